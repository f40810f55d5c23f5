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
    for stem in ("t-1", "t-2"):
        assert out["t.png"].with_stem(stem).read_bytes().startswith(b"\x89PNG")
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
        (["--held-out"], "--prompts FILE"),
        (["--tokens", "100000"], "--tokens"),
    ],
)
def test_mistakes_are_named(cli: Cli, words: list[str], named: str) -> None:
    said = cli("bench", "draft", *words)
    assert said.code == 2 and named in said.err


def test_bounds_of_acceptance(cli: Cli, tmp_path: Path) -> None:
    out = {file: tmp_path / "new" / file for file in ("t.csv", "t.png", "t.md")}
    words = ("--csv", out["t.csv"], "--plot", out["t.png"], "--write", out["t.md"], "--prompts", asked(tmp_path))
    words += ("--guesses", "1,2", "--places", 3, "--tokens", 6, "--per-task", 1, "--kv-bytes", "64M")
    said = cli("bench", "draft", "--bound", *words)
    assert said.code == 0, said.err
    assert said.out.count("| rejection |") == 6 and "guesses of pocket-draft, temperature 1" in said.out
    with out["t.csv"].open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {(row["model"], row["second"], row["task"]) for row in rows} == {
        ("pocket", "pocket-draft", task) for task in ("qa", "chat")
    }
    alone = {
        row["accepted"] for row in rows if row["guesses"] == "1" and row["drawn"] != "point" and row["text"] == "0"
    }
    places = {row["position"] for row in rows if row["text"] == "0"}
    assert 1 <= len(places) <= 3 and len({f"{float(value):.9f}" for value in alone}) == len(places), "one guess is one"
    assert all(float(row["accepted"]) <= float(row["best"]) + 1e-9 for row in rows)
    assert out["t.png"].read_bytes().startswith(b"\x89PNG")
    page = out["t.md"].read_text()
    assert page.count("| iid |") == 4 and str(tmp_path) not in page


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--guesses", "2"], "--guesses is for --bound"),
        (["--bound", "--guesses", "2,x"], "guesses='2,x'"),
        (["--bound", "paced"], "leave paced out"),
        (["--bound", "--rounds", "3"], "leave --rounds out"),
        (["--bound", "--verify", "match"], "leave --verify out"),
        (["--bound", "--second", "nowhere"], "nowhere"),
    ],
)
def test_mistakes_about_bounds_are_named(cli: Cli, words: list[str], named: str) -> None:
    said = cli("bench", "draft", "--kv-bytes", "64M", "--tokens", 2, "--per-task", 1, *words)
    assert said.code == 2 and named in " ".join(said.err.split())
