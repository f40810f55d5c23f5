"""`phasewise batch`: a file of requests to a file of answers, and on where it was."""

from __future__ import annotations

import json
from pathlib import Path

from tests.cli.conftest import Cli
from tests.serve.test_batches import line
from tests.serve.tiny_chat import chat_checkpoint


def test_the_batch_command_goes_on_where_it_was(tmp_path: Path, cli: Cli) -> None:
    file, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    words = ("batch", file, "-o", out, "--model", chat_checkpoint(), "--name", "tiny", "--kv-bytes", "64M")
    file.write_text(line("a") + line("bad", max_tokens=-5))
    said = cli(*words)
    assert said.code == 2 and "1 of 2 requests failed" in said.err
    errors = [json.loads(row) for row in (tmp_path / "out.errors.jsonl").read_text().splitlines()]
    assert [row["custom_id"] for row in errors] == ["bad"]
    before = out.read_text()
    out.write_text(before + '{"custom_id": "b", "resp')  # half a line
    file.write_text(line("a") + line("b") + line("bad"))
    said = cli(*words)
    assert said.code == 0 and "2 answered and 0 failed; 1 were there before" in said.err
    assert out.read_text().startswith(before)
    assert sorted(json.loads(row)["custom_id"] for row in out.read_text().splitlines()) == ["a", "b", "bad"]
    assert not (tmp_path / "out.errors.jsonl").exists()
    assert "nothing is left to do" in cli(*words).err
    file.write_text("{")
    assert "line 1: this is not JSON" in cli(*words).err
    out.write_text("no answer\n")
    file.write_text(line("a"))
    assert "line 1 is no answer of a batch" in cli(*words).err
