"""What scripts/kvpress_parity.py compares, without kvpress: the rows here, and what is made of two sides."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from phasewise.errors import UserError
from phasewise.llm import LLM
from tests.bench.test_scripts import load
from tests.serve.tiny_chat import chat_checkpoint

pytestmark = pytest.mark.thorough

ECHO = """#!{python}
import json, sys
asked = json.load(sys.stdin)
assert asked["gguf"] is None and asked["folder"]
for job in asked["jobs"]:
    n = int(len(job["prompt"]) * (1 - job["knobs"]["compression_ratio"]))
    sinks, layers, heads = job["knobs"].get("n_sink", 0), {layers}, 2
    rows = [*range(sinks), *range(len(job["prompt"]) - n + sinks, len(job["prompt"]))]
    print(json.dumps({{"rows": [[rows] * heads] * layers, "tokens": [0] * job["new"]}}))
"""


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """Stands for kvpress's environment: keeps the first few rows and the last ones, and says nothing of use."""
    path = tmp_path / "python"
    path.write_text(ECHO.format(python=sys.executable, layers=2))
    path.chmod(0o755)
    return path


def test_the_window_is_the_same_and_the_rest_is_told_apart(
    python: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    script, page = load("kvpress_parity", monkeypatch), tmp_path / "kv.md"
    words = [
        "--python",
        str(python),
        "--model",
        str(chat_checkpoint()),
        "--lengths",
        "80",
        "--count",
        "2",
        "--new",
        "4",
    ]
    assert script.main([*words, "--methods", "StreamingLLM", "--write", str(page)]) == 0
    said = capsys.readouterr().out
    assert f"| {2 * 2 * 2 * (40 + 20)} | 0 (0.00%) |" in said and "of 4 |" in said
    assert page.read_text().count("<!-- kvpress:begin -->") == 1 and "| StreamingLLM |" in page.read_text()
    assert script.main([*words, "--methods", "SnapKV"]) == 1  # whose rows before the window are not the latest


def test_rows_here_are_as_many_as_said(monkeypatch: pytest.MonkeyPatch) -> None:
    script = load("kvpress_parity", monkeypatch)
    llm = LLM(str(chat_checkpoint()), dtype="float32")
    prompt = script.prompts(llm, [100], 1, 0)[0]
    assert len(prompt) == 100 and prompt == script.prompts(llm, [100], 1, 0)[0] != script.prompts(llm, [100], 1, 1)[0]
    rows, out = script.ours(llm, script.CASES["SnapKV"], prompt, 50, 3)
    assert len(out) == 3 and len(rows) == 2 and all(len(heads) == 2 for heads in rows)
    assert all(len(head) == 50 and head == sorted(head) and head[-32:] == [*range(68, 100)] for h in rows for head in h)
    rows, _ = script.ours(llm, script.CASES["StreamingLLM"], prompt, 50, 3)
    assert all(head == [*range(4), *range(54, 100)] for heads in rows for head in heads)


def test_the_catalogue_says_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    script = load("kvpress_parity", monkeypatch)
    cases, missing = script.chosen(None)
    assert {"SnapKV", "StreamingLLM"} <= set(cases) and set(cases) | set(missing) == set(script.CASES)
    ghost = script.Case("X", lambda rows: f"snapkv:keep={rows},nosuch=1")
    assert not script.known(ghost) and not script.known(script.Case("X", lambda rows: f"nosuch:keep={rows}"))
    with pytest.raises(UserError, match="SnapKV"):
        script.chosen("SnapKW")


def test_differences_are_counted_row_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    one = load("kvpress_parity", monkeypatch).Compared()
    one.add([[[1, 2, 3], [4, 5]]], [[[1, 2, 4], [4, 5, 6]]], ([7, 8, 9], [7, 8, 0]))
    one.add([[[1, 2]]], [[[1, 2]]], ([7], [7]))
    assert (one.rows, one.others, one.sizes) == (7, 1, 1)
    assert (one.answers, one.same, one.tokens, one.before) == (2, 1, 4, 3)


def test_an_environment_that_fails_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = load("kvpress_parity", monkeypatch)
    words = ["--model", str(chat_checkpoint()), "--lengths", "80", "--count", "1", "--methods", "SnapKV", "--python"]
    with pytest.raises(UserError, match="nowhere"):
        script.main([*words, str(tmp_path / "nowhere")])
    broken = tmp_path / "broken"
    broken.write_text(f"#!{sys.executable}\nimport sys\nsys.stdin.read()\nsys.exit(3)\n")
    broken.chmod(0o755)
    with pytest.raises(UserError, match="0 of 2 prompts"):
        script.main([*words, str(broken)])
