"""`phasewise tune` on a tiny model: what it writes is what `serve --config` reads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from phasewise.cli import config as files
from tests.cli.conftest import Cli
from tests.serve.tiny_chat import chat_checkpoint


def test_a_choice_is_written_and_can_be_served(cli: Cli, tmp_path: Path) -> None:
    config, out = tmp_path / "chosen.toml", tmp_path / "t.jsonl"
    how = "--max-loss 0 --rounds 3 --workload fixed:prompt=16,new=8 --requests 2 --prompts random --quality code"
    done = cli("tune", "draft=prompt_lookup", "store=int8", "--model", chat_checkpoint(), *how.split(),
               "--evict", "streaming", "--config", config, "--out", out)  # fmt: skip
    assert done.code == 0, done.err
    said = files.read(config)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    chosen = next(row["recipe"] for row in rows if row["chosen"])
    assert f"chosen: {chosen}" in done.out and str(config) in done.out
    assert {row["recipe"] for row in rows} == {"default", "draft=prompt_lookup"}, "lossy ones, of which none may lose"
    assert (said["model"], said["evict"]) == (str(chat_checkpoint()), "streaming")
    assert said["draft"] == ("prompt_lookup" if "prompt_lookup" in chosen else "paced"), "serve's default"
    assert (
        done.err.startswith("tune: 1 candidate, a few seconds ") and "default: draft=paced evict=streaming" in done.out
    )
    assert cli("serve", "--config", config, "--port", 99999).code == 2


@pytest.mark.parametrize(
    ("words", "says"),
    [("draft=none --all", "leave 'draft=none' out"),
     ("--max-loss 2", "max-loss='2' must be a share"), ("--quality cod", "unknown task 'cod'"),
     ("--quality code@8k", "needs a context of"), ("draf=x", "unknown verb")],
)  # fmt: skip
def test_mistakes_are_named(cli: Cli, words: str, says: str) -> None:
    done = cli("tune", *words.split(), "--model", chat_checkpoint())
    assert done.code == 2 and says in done.err
