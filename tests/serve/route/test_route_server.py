"""The router before two real servers: fewer prompt tokens are computed than by turns, and one of them may die."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx
import openai
import pytest

from phasewise.bench.server import free_port
from tests.forked import Forked
from tests.serve.running import PATIENCE, launch
from tests.serve.tiny_chat import chat_checkpoint

pytest.importorskip("zmq")
WORDS = "the quick brown fox jumps over the lazy dog and then the other thing "


@contextmanager
def running(*words: str) -> Iterator[tuple[str, Forked]]:
    """`phasewise WORDS`, and its address."""
    process = launch(*words)
    try:
        found = re.search(r"http://\S+", process.stdout.readline())
        assert found is not None
        yield found[0], process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate(timeout=PATIENCE)


@contextmanager
def routed(by: str, events: bool = False) -> Iterator[tuple[str, list[tuple[str, Forked]]]]:
    """A router before two servers, and these."""
    with ExitStack() as stack:
        ends = [f"tcp://127.0.0.1:{free_port()}" for _ in range(2)]
        model = ["--model", str(chat_checkpoint()), "--name", "tiny", "--port", "0", "--draft", "none"]
        servers = [stack.enter_context(running("serve", *model, "--kv-events", end)) for end in ends]
        words = [word for url, _ in servers for word in ("--to", url)]
        words += [word for end in ends for word in ("--kv-events", end)] if events else []
        url, _ = stack.enter_context(running("route", *words, "--port", "0", "--by", by, "--check-every", "0.2"))
        yield url, servers


def ask(url: str, number: int, turn: int) -> httpx.Response:
    """A turn of one of three conversations."""
    messages = [{"role": "user", "content": f"{number} " * 40 + WORDS * 2}]
    for earlier in range(turn):
        messages += [{"role": "assistant", "content": "so " * 20}, {"role": "user", "content": f"{earlier} " * 30}]
    body = {"model": "tiny", "messages": messages, "max_tokens": 4, "temperature": 0}
    return httpx.post(f"{url}/v1/chat/completions", json=body, timeout=PATIENCE)


def hits(url: str) -> float:
    found = re.search(r"^phasewise_prefix_hits_total (\S+)$", httpx.get(f"{url}/metrics").text, re.MULTILINE)
    assert found is not None
    return float(found[1])


def conversations(by: str, events: bool = False) -> tuple[float, list[Any]]:
    """Prompt tokens found in caches, and the answers."""
    with routed(by, events) as (url, _):
        said = []
        for turn in range(3):
            for number in range(3):
                said.append(ask(url, number, turn).json()["choices"][0]["message"]["content"])
                time.sleep(0.1)  # KV events are on their way
        return hits(url), said


def test_prefixes_are_found() -> None:
    (learnt, answers), (told, same), (blind, others) = (
        conversations("prefix"), conversations("prefix", events=True), conversations("turns"),
    )  # fmt: skip
    assert answers == same == others
    assert min(learnt, told) > 1.5 * blind, (learnt, told, blind)


def test_a_server_is_killed_while_it_streams() -> None:
    """Its client is told by the last event, and not by one that says that all went well."""
    body = {"model": "tiny", "prompt": "the", "max_tokens": 2000, "stream": True, "ignore_eos": True}
    with routed("prefix") as (url, servers):
        lines = []
        with httpx.stream("POST", f"{url}/v1/completions", timeout=PATIENCE, json=body) as stream:
            home = servers[int(stream.headers["x-served-by"])][1]
            for line in stream.iter_lines():
                lines.append(line)
                if len(lines) == 6:
                    home.kill()
        *given, last = [json.loads(line.removeprefix("data: ")) for line in lines if line]
        assert given and all("choices" in event for event in given)
        assert last["error"]["type"] == "server_error" and last["error"]["code"] == "broken_off"
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        said = client.completions.create(model="tiny", prompt="the", max_tokens=4)
        assert said.choices[0].text, "the other server answers"


def test_a_server_dies() -> None:
    with routed("prefix") as (url, servers):
        homes = {ask(url, number, 0).headers["x-served-by"] for number in range(2)}
        assert homes == {"0", "1"}
        servers[0][1].kill()
        for number in range(4):
            answer = ask(url, number, 1)
            assert answer.status_code == 200 and answer.headers["x-served-by"] == "1"
        with httpx.stream("POST", f"{url}/v1/completions", timeout=PATIENCE, json={
            "model": "tiny", "prompt": "the", "max_tokens": 8, "stream": True, "ignore_eos": True,
        }) as stream:  # fmt: skip
            lines = [line for line in stream.iter_lines() if line]
        assert lines[-1] == "data: [DONE]" and json.loads(lines[0][6:])["choices"]
        servers[1][1].kill()
        assert ask(url, 0, 0).status_code == 503
