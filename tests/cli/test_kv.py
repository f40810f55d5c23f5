"""`phasewise bench kv`: everything that is written, lines to go on from, and mistakes by name."""

from __future__ import annotations

import csv
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from phasewise.errors import UserError
from tests.cli.conftest import Cli
from tests.serve.tiny_chat import chat_checkpoint

SMALL = ("--examples", 2, "--kv-bytes", "64M", "--tasks", "copy,code")
QUICK = (*SMALL, "--model", "TINY", "--settings", "store=int8")
GHOST = "draft=draft_model:model=nowhere"
SETTINGS = f"evict=snapkv;store=int8 evict=snapkv:keep=0.25;{GHOST}"


def test_tables_lines_csv_plot_and_page(cli: Cli, tmp_path: Path) -> None:
    model, name = chat_checkpoint(), chat_checkpoint().name
    out = {file: tmp_path / "new" / file for file in ("t.jsonl", "t.csv", "t.png", "t.md")}
    words = ("bench", "kv", "--settings", SETTINGS, "--budgets", 2, *SMALL, "--model", model, "--out", out["t.jsonl"])
    more = ("--csv", out["t.csv"], "--plot", out["t.png"], "--write", out["t.md"])
    said = cli(*words, *more)
    assert said.code == 0, said.err
    kinds = [
        f"evict=snapkv:keep={keep}{kind}" for kind in ("", ",layers=pyramid", ",heads=ada") for keep in (0.25, 0.125)
    ]
    settings = ["dense", *kinds, "store=int8 evict=snapkv:keep=0.25"]
    assert all(said.out.count(f"| `{setting}` |") == 2 for setting in settings)
    assert f"Not run: `{GHOST}`, copy, code: " in said.out
    lines = [json.loads(text) for text in out["t.jsonl"].read_text().splitlines()]
    assert [line["setting"] for line in lines] == [one for one in (*settings, GHOST) for _ in range(2)]
    with out["t.csv"].open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["task"], row["setting"]) for row in rows] == [(t, s) for t in ("copy", "code") for s in settings]
    assert all(float(row["live"]) > 0 and row["model"] == name for row in rows)
    assert [row["front"] for row in rows if row["setting"] == "dense"] != [] and any("live" in r["front"] for r in rows)
    for stem in ("t-copy-live", "t-copy-read", "t-code-live", "t-code-read"):
        assert out["t.png"].with_stem(stem).read_bytes().startswith(b"\x89PNG")
    page = out["t.md"].read_text()
    assert page.startswith("# KV methods") and page.count("| `dense` |") == 2 and str(tmp_path) not in page
    assert (
        f"phasewise bench kv --model {name} --tasks copy,code --examples 2 --settings " in page
        and str(model) not in page
    )

    refused = cli(*words)
    assert refused.code == 2 and "add --resume" in refused.err
    kept = out["t.jsonl"].read_text().splitlines(keepends=True)
    out["t.jsonl"].write_text("".join(kept[:3]))
    again = cli(*words, "--resume", *more)
    assert again.code == 0 and again.out == said.out
    assert out["t.jsonl"].read_text().splitlines(keepends=True)[:3] == kept[:3]
    assert len(out["t.jsonl"].read_text().splitlines()) == len(kept)
    assert out["t.md"].read_text() == page


@pytest.mark.thorough
def test_runs_of_one_model_stand_side_by_side_on_a_page(cli: Cli, tmp_path: Path) -> None:
    model, page = chat_checkpoint(), tmp_path / "page.md"
    short = ("--kv-bytes", "64M", "--model", model, "--dtype", "float32", "--examples", 1, "--settings", "store=int8")
    short = (*short, "--write", page)
    for tasks, more in (
        ("copy", ()),
        ("sort", ("--section", "tiny, lists of 1,000")),
        ("later@256", ("--section", "tiny")),
    ):
        said = cli("bench", "kv", *short, "--tasks", tasks, *more)
        assert said.code == 0, said.err
    text = page.read_text()
    assert [line for line in text.splitlines() if line.startswith("### ")] == [
        f"### {model.name}", "### tiny, lists of 1,000", "### tiny",
    ]  # fmt: skip
    command = f"--model {model.name} --dtype float32 --tasks sort --examples 1 --settings store=int8"
    assert f"`phasewise bench kv {command} --write page.md --section 'tiny, lists of 1,000'`" in text
    heads = [line.partition(":")[0] for line in text.splitlines() if "right answers" in line]
    assert heads == ["copy", "sort", "later@256"]
    for name in ("tiny, lists of 1,000", "tiny"):
        assert text.count(f"<!-- kv {name}:begin -->") == text.count(f"<!-- kv {name}:end -->") == 1

    again = cli("bench", "kv", *short, "--tasks", "reverse", "--section", "tiny, lists of 1,000")
    assert again.code == 0, again.err
    changed = page.read_text()
    assert "sort: right answers" not in changed and changed.count("reverse: right answers") == 1
    assert changed.partition("<!-- kv tiny,")[0] == text.partition("<!-- kv tiny,")[0]
    assert changed.partition("<!-- kv tiny:")[2] == text.partition("<!-- kv tiny:")[2]


def test_the_pages_commands_name_its_sections(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page, copy = Path(__file__).parents[2] / "docs" / "results" / "kv.md", tmp_path / "docs" / "results" / "kv.md"
    copy.parent.mkdir(parents=True)
    copy.write_text(page.read_text(encoding="utf-8"), encoding="utf-8")
    monkeypatch.chdir(tmp_path)

    def stop(*_: object) -> None:
        raise UserError("all is well so far")

    monkeypatch.setattr("phasewise.cli.kv._run", stop)
    pages = page.parents[1].joinpath("kv.md").read_text(encoding="utf-8") + copy.read_text(encoding="utf-8")
    commands = re.findall(r"^`?phasewise (bench kv [^`\n]* --section [^`\n]*)", pages, re.M)
    assert len(commands) == 5
    for command in commands:
        said = cli(*shlex.split(command))
        assert said.code == 2 and "all is well so far" in said.err
    for name in re.findall(r"<!-- kv (.+):begin -->", copy.read_text(encoding="utf-8")):
        said = cli(*map(str, ("bench", "kv", "--settings", "store=int8", "--write", copy, "--section", name)))
        assert said.code == 2 and "all is well so far" in said.err


def test_eval_has_the_second_question(cli: Cli, tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    said = cli("eval", "later@256", "--examples", 2, "--model", chat_checkpoint(), "--kv-bytes", "64M", "--out", out)
    assert said.code == 0, said.err
    assert [json.loads(line)["name"] for line in out.read_text().splitlines()] == ["later@256"]


@pytest.mark.thorough
def test_a_page_names_the_file_of_prompts(cli: Cli, tmp_path: Path) -> None:
    asked, page = tmp_path / "asked.jsonl", tmp_path / "page.md"
    asked.write_text("".join(json.dumps({"prompt": f"copy {word}"}) + "\n" for word in ("a", "b", "c")))
    words = ("bench", "kv", "--settings", "store=int8", "--tasks", "agreement", "--prompts", asked, "--examples", 2)
    said = cli(*words, "--kv-bytes", "64M", "--model", chat_checkpoint(), "--write", page)
    assert said.code == 0, said.err
    assert "--tasks agreement --prompts asked.jsonl --examples 2" in page.read_text()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--settings", "evict=snapkw"), "snapkv"),
        (("--settings", "evict=snapkv:kep=1"), "keep"),
        (("--settings", "snapkv"), "VERB=METHOD"),
        (("--settings", " ; "), "settings="),
        (("--tasks", "recal@1k"), "recall@1k"),
        (("--tasks", ","), "tasks="),
        (("--tasks", "agreement"), "--prompts"),
        (("--tasks", "docs@8k", "--model", "TINY"), "docs@2k"),
        (("--budgets", "0"), "budgets"),
        (("--examples", "0"), "examples"),
        (("--resume",), "--out"),
        ((*QUICK, "--section", "pocket 8k"), "--write"),
        ((*QUICK, "--section", "a-->b", "--write", "PAGE"), "section="),
        ((*QUICK, "--section", "two  spaces", "--write", "PAGE"), "section="),
        ((*QUICK, "--section", "", "--write", "PAGE"), "section="),
        ((*QUICK, "--section", "a:begin", "--write", "PAGE"), "section="),
        (("--model", "pokcet"), "pocket"),
        (("--evict", "snapkw"), "snapkv"),
    ],
    ids=str,
)
def test_mistakes_are_named(cli: Cli, tmp_path: Path, words: tuple[Any, ...], says: str) -> None:
    stands = {"TINY": chat_checkpoint(), "PAGE": tmp_path / "page.md"}
    said = cli("bench", "kv", *(stands.get(word, word) for word in words))
    assert not stands["PAGE"].exists()
    assert said.code == 2 and says in said.err


@pytest.mark.parametrize(("text", "says"), [("no json\n", "JSON lines"), ("[1]\n", "no objects")])
def test_a_file_of_something_else_is_not_gone_on_with(cli: Cli, tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(text)
    said = cli("bench", "kv", "--out", path, "--resume")
    assert said.code == 2 and says in said.err and path.read_text() == text


def test_a_page_that_is_broken_is_refused_before_anything_runs(cli: Cli, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- kv pocket:end -->\n")
    said = cli("bench", "kv", *SMALL, "--write", page)
    assert said.code == 2 and "kv pocket:begin" in said.err and page.read_text() == "<!-- kv pocket:end -->\n"
