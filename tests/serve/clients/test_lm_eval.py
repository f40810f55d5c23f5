"""The tasks that lm-eval is given: the examples of `phasewise eval`, graded by the same rules."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from phasewise.train.tasks import checker
from tests.cli.test_project import script

REPLIES = ["", "42", " the fox \n", '{"a": 1}', '{"a":1 }', "6-4=2: 2, so 2", "so 2", "x\n\n  y  \nz", "{"]


@pytest.mark.parametrize("row", ["copy", "reverse", "json", "arithmetic"])
def test_replies_are_graded_as_the_project_grades_them(row: str) -> None:
    grades = script("clients/lm_eval_grades")
    for answer in ('{"a": 1}',) if row == "json" else ("42", "the fox", "6-4=2: 2, so 2"):
        check = checker(row, answer)
        found = [grades.generated({"row": row, "answer": answer}, [reply])["exact"] for reply in REPLIES]
        assert found == [float(check(reply)) for reply in REPLIES] and len(set(found)) == 2


def test_the_next_line_and_losses() -> None:
    grades = script("clients/lm_eval_grades")
    doc = {"row": "next line", "answer": "    y = 1"}
    found = [grades.generated(doc, [reply])["exact"] for reply in ("\n\n    y = 1  \nz", "y = 1", "")]
    assert found == [1.0, 0.0, 0.0]
    assert grades.likely({"tokens": 4, "bytes": 8}, [(-2.0,)]) == {
        "nats_per_token": 0.5, "bits_per_byte": pytest.approx(0.25 / math.log(2)),
    }  # fmt: skip


def test_both_numbers_are_held_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tasks = script("clients/lm_eval_tasks")
    (tmp_path / "eval.json").write_text(json.dumps({"copy exact": 0.5, "code nats/token": 2.0}))
    assert tasks.compare(tmp_path) == 1, "nothing was measured"
    results = {"phasewise_copy": {"exact,none": 0.5}, "phasewise_code": {"nats_per_token,none": 2.0001, "alias": "x"}}
    body = {"config": {"model": "local-completions"}, "results": results}
    (tmp_path / "results_1.json").write_text(json.dumps(body))
    assert tasks.compare(tmp_path) == 0
    assert "| copy exact | local-completions | 50.0% | 50.0% |" in capsys.readouterr().out
    results["phasewise_copy"]["exact,none"] = 0.45
    (tmp_path / "results_1.json").write_text(json.dumps(body))
    assert tasks.compare(tmp_path) == 1


def test_the_tasks_hold_what_is_measured(tmp_path: Path) -> None:
    tasks = script("clients/lm_eval_tasks")
    tasks.CHATS, tasks.TEXTS = ("copy",), ()
    tasks.quality.WINDOW, window = 16, tasks.quality.WINDOW
    try:
        tasks.write(tmp_path, "pocket", 3, 0)
    finally:
        tasks.quality.WINDOW = window
    docs = [json.loads(line) for line in (tmp_path / "phasewise_copy.jsonl").read_text().splitlines()]
    assert len(docs) == 3 and all(doc["answer"] in doc["question"] for doc in docs)
    values = json.loads((tmp_path / "eval.json").read_text())
    assert set(values) == {"copy exact", "code nats/token", "code bits/byte"} and values["copy exact"] == 1.0
    assert "!function lm_eval_grades.generated" in (tmp_path / "phasewise_copy.yaml").read_text()
