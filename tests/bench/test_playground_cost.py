"""What the playground costs: the script asks all contenders the same, in turns, and says no more than intervals do."""

from __future__ import annotations

import pytest

from tests.bench.test_scripts import load, table
from tests.serve.running import Server
from tests.serve.tiny_chat import chat_checkpoint


def test_everybody_has_a_turn_in_every_round(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = load("playground_cost", monkeypatch)
    words = ["--model", str(chat_checkpoint()), "--rounds", "3", "--batch", "2", "--new", "32", "--vocab", "90"]
    script.main([*words, "--dtype", "float32"])
    printed = capsys.readouterr().out
    rows = table(printed, "figure")
    names = [script.BASE, script.AGAIN, script.UNSEEN, script.SEEN]
    assert [(row[0], row[1]) for row in rows] == [(figure, name) for figure in script.FIGURES for name in names]
    assert all(float(row[2]) > 0 and bool(row[3]) == (row[1] != script.BASE) for row in rows)
    assert all("[" in row[3] for row in rows if row[3])
    assert printed.splitlines()[-1].startswith(("A page that nobody looks at costs", "Not certain"))


def test_a_looker_has_the_events_before_the_round_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    script = load("playground_cost", monkeypatch)
    with Server() as server:
        with script.looking(server.url):
            assert server.health().status_code == 200
        with pytest.raises(script.UserError, match="does not say hello"), script.looking(f"{server.url}/nowhere"):
            pass


@pytest.mark.parametrize(
    ("ratios", "says"),
    [
        ([1.001, 1.002, 1.003], "less than 1 %"),
        ([1.02, 1.03, 1.04], "more than 1 %"),
        ([0.99, 1.0, 1.05], "Not certain"),
        ([1.0, 1.0], "Too few rounds"),
    ],
)
def test_the_verdict_follows_from_the_interval(ratios: list[float], says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    script = load("playground_cost", monkeypatch)
    base = {number: 10.0 + number for number in range(len(ratios))}
    unseen = {number: ratio * base[number] for number, ratio in enumerate(ratios)}
    assert says in script.verdict({script.FIGURES[0]: {script.BASE: base, script.UNSEEN: unseen}})
