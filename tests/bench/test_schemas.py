"""`bench grammar`: verdicts over schemas whose instances others have judged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from phasewise.bench.schemas import SchemaCase, judge, pace, read
from phasewise.cli import main
from phasewise.errors import UserError
from phasewise.methods.sample._words import words_of
from tests.sample.structured import engine, model, prompts, tokenizer
from tests.serve.tiny_chat import chat_checkpoint

pytest.importorskip("llguidance")
PLACES = [folder / "shared" / "data" / "maskbench_sample.jsonl" for folder in Path(__file__).resolve().parents]
SAMPLE = next((path for path in PLACES if path.exists()), PLACES[0])
INTEGER = {"type": "integer", "minimum": 3}
CASES = [
    SchemaCase("right", INTEGER, [(3, True), (12, True), (2, False), ("3", False)]),
    SchemaCase("wrong", INTEGER, [(3, True), (2, True)]),
    SchemaCase("lax", INTEGER, [(3, False)]),
    SchemaCase("refused", {"not": INTEGER}, [(3, False)]),
]


def test_verdicts() -> None:
    found = list(judge(CASES, tokenizer(), words_of(model())))
    assert [verdict.how for verdict in found] == ["right", "wrong", "wrong", "refused"]
    assert found[1].why == "refuses 2" and found[2].why == "allows 3" and "not" in found[3].why
    assert len(found[0].masks) == 8 and not found[3].masks  # two ends beside the bytes
    assert all(verdict.compile > 0 for verdict in found)
    assert found[0].row()["masks"] == 8


def test_the_sample_has_no_wrong_answers() -> None:
    if not SAMPLE.exists():
        pytest.skip("the sample of MaskBench is not here")
    cases = read(SAMPLE)[:60]
    found = [verdict.how for verdict in judge(cases, tokenizer(), words_of(model()))]
    assert found.count("wrong") == 0 and found.count("right") > 40


def test_the_pace_of_both() -> None:
    found = pace(engine, prompts(9, 9), 24, 2)
    assert found.per_token is not None and found.per_pass is not None and found.per_pass.n == found.per_token.n == 2
    assert found.tokens["free"] == 1 and found.tokens["schema"] >= 1
    with pytest.raises(UserError, match="no pass was shared"):
        pace(engine, prompts(9, 9), 2, 1)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, out = tmp_path / "some.jsonl", tmp_path / "out.jsonl"
    rows = [{"name": c.name, "schema": c.schema, "tests": [{"data": d, "valid": v} for d, v in c.tests]} for c in CASES]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(SystemExit) as left:
        main(["bench", "grammar", str(file), "--model", str(chat_checkpoint()), "--batch", "2", "--new", "12",
              "--rounds", "1", "--out", str(out)])  # fmt: skip
    said = capsys.readouterr().out
    assert not left.value.code and "| schemas | 1 | 2 | 1 |" in said and "times as long" in said
    kept = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row.get("verdict") for row in kept] == ["right", "wrong", "wrong", "refused", None]
    assert kept[-1]["right"] == 1 and kept[-1]["tpot_ratio"] > 0 and kept[-1]["pass_ratio"] > 0


def test_files_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"name": "a"}\n')
    for path in (tmp_path / "bad.jsonl", tmp_path / "missing.jsonl"):
        with pytest.raises(UserError, match="no file of schemas"):
            read(path)
