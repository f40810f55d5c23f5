"""`phasewise bench draft`: everything that is written, and mistakes by name."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from tests.cli.conftest import Cli

SMALL = ("--tokens", 6, "--per-task", 2, "--kv-bytes", "64M", "--batch", "1,2")


def asked(folder: Path) -> Path:
    path = folder / "asked.jsonl"
    lines = [{"category": task, "turns": [f"{task} {i}?"]} for task in ("qa", "stem") for i in range(3)]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def test_tables_csv_plot_and_page(cli: Cli, tmp_path: Path) -> None:
    out = {file: tmp_path / "new" / file for file in ("t.csv", "t.png", "t.md")}
    words = ("--csv", out["t.csv"], "--plot", out["t.png"], "--write", out["t.md"], "--prompts", asked(tmp_path))
    said = cli("bench", "draft", "prompt_lookup:k=6", "paced", "draft_model:model=nowhere", *SMALL, *words)
    assert said.code == 0, said.err
    assert said.out.count("| prompt_lookup:k=6 |") == 3 and said.out.count("| plain |") == 1
    assert "qa: 2 answers" in said.out and "chat: 2 answers" in said.out
    assert "not run: draft_model:model=nowhere: " in said.out
    with out["t.csv"].open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["batch"], row["setting"], row["task"]) for row in rows] == [
        (batch, setting, task)
        for batch in "12"
        for setting in ("plain", "prompt_lookup:k=6", "paced")
        for task in ("qa", "chat", "all")
    ]
    assert all(float(row["speed"]) > 0 and row["model"] == "pocket" for row in rows)
    assert out["t.png"].read_bytes().startswith(b"\x89PNG")
    page = out["t.md"].read_text()
    assert page.count("| paced |") == 3 and str(tmp_path) not in page


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["nosuch"], "nosuch"),
        (["prompt_lookup:q=1"], "q"),
        (["--batch", "0"], "batch="),
        (["--draft", "paced"], "--draft"),
        (["--prompts", "nowhere.jsonl"], "nowhere.jsonl"),
        (["--tokens", "100000"], "--tokens"),
    ],
)
def test_mistakes_are_named(cli: Cli, words: list[str], named: str) -> None:
    said = cli("bench", "draft", *words)
    assert said.code == 2 and named in said.err
