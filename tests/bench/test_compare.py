from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest

from phasewise.bench import compare
from phasewise.bench.compare import OURS, Compare, peers_of
from phasewise.bench.contender import RoundWork
from phasewise.errors import UserError
from tests.serve.tiny_chat import chat_checkpoint

SPEED = {OURS: 30.0, "transformers": 10.0, "transformers-cb": 20.0}


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str]]:
    """Contenders that only write results; returns the order of their turns."""
    seen: list[tuple[int, str]] = []

    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        job = RoundWork(**json.loads(command[-1]))
        seen.append((job.number, job.contender))
        about = {"contender": job.contender, "round": job.number}
        rows = [{**about, "test": "check", "tokens": [1, 2, 3, 4 + (job.contender != OURS)]}]
        rows += [{**about, "test": test, "value": SPEED[job.contender] * (1 + job.number)} for test in job.tests]
        if job.contender == "transformers-cb" and job.number == 1:
            return subprocess.CompletedProcess(command, 1, "", "a long story\nRuntimeError: out of blocks\n\n")
        return subprocess.CompletedProcess(command, 0, "a stray line\n" + "\n".join(map(json.dumps, rows)), "")

    monkeypatch.setattr(compare.subprocess, "run", run)
    return seen


def test_rounds_are_interleaved_and_rotate(turns: list[tuple[int, str]]) -> None:
    run = Compare(RoundWork("", "none", ["decode1"]), peers_of("transformers"))
    assert list(run.run(2)) == [1, 2, 3, 4, 5, 6]
    assert turns == [
        (0, OURS), (0, "transformers"), (0, "transformers-cb"),
        (1, "transformers"), (1, "transformers-cb"), (1, OURS),
    ]  # fmt: skip


def test_the_table_has_medians_and_paired_ratios(turns: list[tuple[int, str]]) -> None:
    run = Compare(RoundWork("", "none", ["decode1", "prefill9"]), peers_of("transformers"))
    list(run.run(3))
    header, rows = run.table()
    assert header == ["tokens/s", OURS, "transformers", "phasewise / transformers", "transformers-cb",
                      "phasewise / transformers-cb"]  # fmt: skip
    assert rows[0] == ["decode1", "60", "20", "3.00 (3.00 to 3.00)", "40", "1.50 (1.50 to 1.50)"]
    assert run.same_tokens("transformers") == 0.75


def test_a_failing_peer_is_reported_and_we_are_not_excused(
    turns: list[tuple[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Compare(RoundWork("", "none", ["decode1"]), peers_of("transformers"))
    list(run.run(2))
    assert run.failures == {"transformers-cb": "RuntimeError: out of blocks"}
    assert run.table()[1][0][-1] == "1.50"  # the round that it lacks does not count
    monkeypatch.setattr(
        compare.subprocess, "run", lambda c, **o: subprocess.CompletedProcess(c, 1, "", "error: no directory 'x'")
    )
    with pytest.raises(UserError, match="could not run the comparison: no directory 'x'"):
        list(Compare(RoundWork("", "x", ["decode1"]), ["transformers"]).run(1))


def test_mistakes_are_named() -> None:
    with pytest.raises(UserError, match="transformers"):
        peers_of("vlm")
    with pytest.raises(UserError, match="decodeB"):
        list(Compare(RoundWork("", "none", ["decod1"]), ["transformers"]).run(1))


def test_a_real_round_against_transformers_gives_the_same_tokens() -> None:
    pytest.importorskip("transformers")
    job = RoundWork("", str(chat_checkpoint()), ["decode2", "prefill24"], "float32", new=3, prompt=8, threads=1)
    run = Compare(job, peers_of("transformers"), limit=200)
    assert list(run.run(1)) == [1, 2, 3]
    assert not run.failures
    for peer in run.peers:
        assert run.same_tokens(peer) == 1.0
        assert run.values(peer, "prefill24")
