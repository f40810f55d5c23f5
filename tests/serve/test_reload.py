"""SIGHUP: recipes are read again by a server that goes on; requests under way keep theirs."""

from __future__ import annotations

import re
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from phasewise.engine.limits import Limits
from phasewise.errors import UserError
from phasewise.llm import LLM
from phasewise.request.params import Params
from tests.serve.running import PATIENCE, launch
from tests.serve.tiny_chat import chat_checkpoint

PROMPT = "the quick brown fox jumps over the lazy dog and then the other thing " * 3
FAST = '[recipes.fast]\ndraft = "prompt_lookup:k=2"\n'
LONG = '[recipes.long]\nevict = "streaming:sinks=2,window=30"\n'
SHORT = LONG.replace("window=30", "window=10")


class Running:
    """`phasewise serve --config FILE`, whose recipes are written anew."""

    def __init__(self, path: Path, *words: str) -> None:
        self.path, self.name = path, chat_checkpoint().name
        self._said = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.process = launch("serve", "--config", str(path), "--port", "0", *words,
                              errors=self._said)  # fmt: skip
        found = re.search(r"http://[^ ]+", self.process.stdout.readline())
        assert found is not None, self.log()
        self.url = found[0]
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE)

    def log(self) -> str:
        self._said.seek(0)
        return self._said.read()

    def reread(self, text: str, says: str) -> str:
        """What the log says after the file is this and the server was told; `says`: part of its first line."""
        before = len(self.log())
        self.path.write_text(text)
        self.process.send_signal(signal.SIGHUP)
        deadline = time.monotonic() + PATIENCE
        while says not in self.log()[before:]:
            assert time.monotonic() < deadline, self.log()[before:]
            time.sleep(0.02)
        return self.log()[before:]

    def names(self) -> list[str]:
        return [model.id.removeprefix(self.name) for model in self.client.models.list()]

    def text(self, recipe: str) -> str:
        done = self.client.completions.create(model=f"{self.name}@{recipe}", **self.asked(24))
        return str(done.choices[0].text)

    def asked(self, tokens: int) -> dict[str, Any]:
        return {"prompt": PROMPT, "max_tokens": tokens, "temperature": 0, "extra_body": {"ignore_eos": True}}


@contextmanager
def running(path: Path, text: str, *words: str) -> Iterator[Running]:
    path.write_text(text)
    server = Running(path, *words)
    try:
        yield server
    finally:
        server.process.kill()
        server.process.communicate(timeout=PATIENCE)


def alone(tokens: int, **verbs: str) -> str:
    """What an engine answers that knows nothing else."""
    llm = LLM(str(chat_checkpoint()), **verbs)
    return llm.generate([PROMPT], Params(max_tokens=tokens, ignore_eos=True))[0].text


def test_recipes_come_change_and_go_while_requests_keep_theirs(tmp_path: Path) -> None:
    head = f'model = "{chat_checkpoint()}"\nkv-bytes = "64M"\n'
    wide, narrow = (alone(24, evict=f"streaming:sinks=2,window={rows}") for rows in (30, 10))
    assert wide != narrow, "the recipes cannot be told apart"
    with running(tmp_path / "own.toml", head + LONG) as server:
        assert server.names() == ["", "@long"] and server.text("long") == wide
        stream = server.client.completions.create(model=f"{server.name}@long", stream=True, **server.asked(600))
        begun = next(iter(stream)).choices[0].text

        server.reread(head + SHORT + FAST, "the recipes have been read again: long, fast")
        assert server.names() == ["", "@long", "@fast"]
        assert server.text("long") == narrow and server.text("fast") == alone(24)

        said = server.reread(head.replace("64M", "32M") + FAST + 'place = "colocated"\n', "stay as they were")
        assert "cannot have a place of its own" in said and str(server.path) in said
        server.reread(head + FAST + "[recipes.broken", "stay as they were: " + str(server.path) + " is not TOML")
        server.reread(head + '[recipes.bad]\ndraft = "draft_model:model=no/such"\n', "stay as they were: ")
        assert server.names() == ["", "@long", "@fast"] and server.text("long") == narrow

        said = server.reread(head.replace("64M", "32M") + 'evict = "streaming"\n' + FAST, "read again: fast")
        assert "evict, kv-bytes changed as well, and will count when the server starts again" in said
        assert server.names() == ["", "@fast"] and server.text("fast") == alone(24)
        with pytest.raises(openai.NotFoundError):
            server.text("long")
        rest = "".join(chunk.choices[0].text for chunk in stream)
        assert begun + rest == alone(600, evict="streaming:sinks=2,window=30")

        server.reread(head + LONG, "read again: long")
        assert server.text("long") == wide
        labels = set(re.findall(r'requests_accepted_total\{recipe="(.+)"\}', httpx.get(f"{server.url}/metrics").text))
        assert labels == {"default", "long", "fast"}, "counted by name, whatever the methods were"


def test_the_command_line_still_wins(tmp_path: Path) -> None:
    head = f'model = "{chat_checkpoint()}"\n'
    with running(tmp_path / "own.toml", head, "--recipe", "long=evict=streaming:sinks=2,window=10") as server:
        server.reread(head + LONG + FAST, "read again: long, fast")
        assert server.text("long") == alone(24, evict="streaming:sinks=2,window=10")


def test_workers_in_processes_are_told(tmp_path: Path) -> None:
    head = f'model = "{chat_checkpoint()}"\nkv-bytes = "64M"\nplace = "disaggregated:prefill=1,decode=1"\n'
    with running(tmp_path / "own.toml", head + LONG) as server:
        stream = server.client.completions.create(model=f"{server.name}@long", stream=True, **server.asked(200))
        begun = next(iter(stream)).choices[0].text
        server.reread(head + SHORT + FAST, "the recipes have been read again: long, fast")
        assert server.text("long") == alone(24, evict="streaming:sinks=2,window=10")
        assert server.text("fast") == alone(24)
        server.reread(head + '[recipes.bad]\ndraft = "draft_model:model=no/such"\n', "stay as they were: ")
        assert server.names() == ["", "@long", "@fast"] and server.text("fast") == alone(24)
        rest = "".join(chunk.choices[0].text for chunk in stream)
        assert begun + rest == alone(200, evict="streaming:sinks=2,window=30")


def test_exact_holds_for_what_comes_later() -> None:
    llm = LLM(str(chat_checkpoint()), limits=Limits(exact=True))
    with pytest.raises(UserError, match="exact refuses what may change answers"):
        llm.revise({"long": {"evict": "streaming"}})
    assert llm.recipes == () and set(llm.lossy) == {""}


def test_what_was_bound_once_is_bound_again_by_its_name() -> None:
    llm = LLM(str(chat_checkpoint()), recipes={"a": {"evict": "streaming:window=30"}})
    second = llm.revise({"a": {"evict": "streaming:window=10"}})["a"]
    assert second != "a"
    assert llm.revise({"a": {"evict": "streaming:window=30"}}) == {"a": "a"}
    assert llm.revise({"a": {"evict": "streaming:window=10"}}) == {"a": second}
    assert len(llm.engine.recipes) == 3  # type: ignore[attr-defined]
