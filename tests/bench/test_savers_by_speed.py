"""Savers' turns, apart by how fast memory was read: gains and shares from made-up times, and files of another kind."""

from __future__ import annotations

from pathlib import Path

import pytest

from phasewise.bench.savers import DENSE, SettingTurn
from phasewise.bench.worth import worths, write_csv
from tests.bench.test_scripts import load, table

GB = 1e9


def rounds(*settings: tuple[str, float, float, float]) -> list[SettingTurn]:
    """Slow rounds of 50 GB/s and fast ones of 100 in which dense reads 1 GB in 30 ms, and others (name, seconds where
    slow and where fast, bytes) theirs."""
    found = []
    for number, rate in enumerate((50 * GB, 100 * GB, 50 * GB)):
        found.append(SettingTurn(DENSE, 1, 0, number, 0.03, GB, 4.0, rate))
        for name, slow, fast, read in settings:
            seconds, held = fast if rate > 60 * GB else slow, 2.0 if "skip" in name else 4.0
            found.append(SettingTurn(name, 1, 0, number, seconds, read, held, rate))
    return found


def test_slow_and_fast_rounds_are_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the bytes are 10 ms at 50 GB/s, whose promise is 30 / 20, and 5 ms at 100, with 30 / 25."""
    script = load("savers_by_speed", monkeypatch)
    turns = rounds(("all of it", 0.02, 0.025, 0.5 * GB), ("none of it", 0.03, 0.0375, 0.5 * GB),
                   ("reads as much", 0.03, 0.03, GB), ("skip=half", 0.01, 0.01, 0.5 * GB))  # fmt: skip
    write_csv(tmp_path / "a.csv", turns, worths(turns, 0.0), {"model": "m"})
    assert script.turns(tmp_path / "a.csv") == turns
    header, rows = script.table(script.pairs(turns, 60 * GB), script.Pair.says)
    assert header == ["setting", "1 at once, slow", "1 at once, fast"]
    assert rows == [
        ["`all of it`", "1.50, 100% (2)", "1.20, 100% (1)"],
        ["`none of it`", "1.00, 0% (2)", "0.80, -100% (1)"],
        ["`reads as much`", "1.00, - (2)", "1.00, - (1)"],
    ]
    assert script.table(script.pairs(turns, 200 * GB), script.Pair.says)[1][0] == ["`all of it`", "1.50, 100% (3)"]


def test_what_is_left_of_a_step_beside_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of dense 10 ms at 50 GB/s and 20 ms at 100; a setting that wins nothing of half the bytes has as much more."""
    script = load("savers_by_speed", monkeypatch)
    turns = rounds(("all of it", 0.02, 0.025, 0.5 * GB), ("none of it", 0.03, 0.03, 0.5 * GB))
    rows = script.table(script.pairs(turns, 60 * GB), script.Pair.leaves)[1]
    assert rows == [["`all of it`", "1.00 (2)", "1.00 (1)"], ["`none of it`", "2.00 (2)", "1.25 (1)"]]


def test_runs_are_put_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = load("savers_by_speed", monkeypatch)
    for name, settings in (("a", [("x", 0.02, 0.025, 0.5 * GB)]), ("b", [("x", 0.03, 0.03, 0.5 * GB)])):
        turns = rounds(*settings)
        write_csv(tmp_path / f"{name}.csv", turns, worths(turns, 0.0), {})
    monkeypatch.setattr("sys.argv", ["x", str(tmp_path / "a.csv"), str(tmp_path / "b.csv"), "--split", "60"])
    script.main()
    assert table(capsys.readouterr().out, "setting")[-1] == ["`x`", "1.25, 50% (4)", "1.10, 50% (2)"]


@pytest.mark.parametrize("text", ["", "a,b\n1,2\n", None])
def test_files_of_another_kind_are_named(
    text: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = load("savers_by_speed", monkeypatch)
    if text is not None:
        (tmp_path / "a.csv").write_text(text)
    monkeypatch.setattr("sys.argv", ["x", str(tmp_path / "a.csv"), "--split", "60"])
    with pytest.raises(SystemExit) as left:
        script.main()
    assert left.value.code == 2 and "a.csv: no turns of `phasewise bench savers --csv`" in capsys.readouterr().err
