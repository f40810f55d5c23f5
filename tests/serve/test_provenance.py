"""`"provenance": true` over HTTP: how each token came about, streamed and whole."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.serve.running import Server

PROMPT = "the quick brown fox jumps over the lazy dog and the quick brown"
CHAT = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 16, "temperature": 0, "ignore_eos": True}
TEXT = {"prompt": PROMPT, "max_tokens": 16, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def guessing() -> Iterator[Server]:
    recipes = {"guess": {"draft": "prompt_lookup:k=4,min_match=1"}, "blocks": {"decode": "block_diffusion:block=4"}}
    with Server(recipes=recipes) as running:
        yield running


def events(reply: httpx.Response) -> list[dict[str, Any]]:
    assert reply.status_code == 200, reply.text
    lines = [line.removeprefix("data: ") for line in reply.text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def entries_of(chunks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [entry for chunk in chunks for entry in chunk["choices"][0].get("provenance", [])]


@pytest.mark.parametrize("path, body", [("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)])
@pytest.mark.parametrize("recipe", ["", "@guess", "@blocks"])
def test_streams_and_whole_answers_tell_the_same(guessing: Server, path: str, body: Any, recipe: str) -> None:
    body = {**body, "model": f"tiny{recipe}", "provenance": True}
    whole = guessing.post(path, body).json()["choices"][0]
    chunks = events(guessing.post(path, {**body, "stream": True}))
    told = entries_of(chunks)
    assert told == whole["provenance"] and len(told) == 16
    text = whole["text"] if "text" in whole else whole["message"]["content"]
    assert "".join(entry["token"] for entry in told) == text
    assert all(0 <= entry["probability"] <= 1 for entry in told)
    origins = {entry["origin"] for entry in told}
    if recipe == "@guess" and "prompt" in body:  # its greedy text repeats the prompt's
        assert origins == {"prefill", "decode", "accepted"}
    else:
        assert origins - {"accepted"} == ({"denoised"} if recipe == "@blocks" else {"prefill", "decode"})


def test_probabilities_are_those_of_logprobs(guessing: Server) -> None:
    body = {**CHAT, "provenance": True, "logprobs": True}
    choice = guessing.post("/v1/chat/completions", body).json()["choices"][0]
    from_logs = [2.718281828459045 ** entry["logprob"] for entry in choice["logprobs"]["content"]]
    assert [entry["probability"] for entry in choice["provenance"]] == pytest.approx(from_logs, abs=1e-5)


def test_who_does_not_ask_is_not_told(guessing: Server) -> None:
    chunks = events(guessing.post("/v1/chat/completions", {**CHAT, "stream": True}))
    assert not any("provenance" in chunk["choices"][0] for chunk in chunks)


def test_an_echoed_prompt_has_none(guessing: Server) -> None:
    choice = guessing.post("/v1/completions", {**TEXT, "echo": True, "provenance": True}).json()["choices"][0]
    assert choice["text"] == PROMPT + "".join(entry["token"] for entry in choice["provenance"])


def test_only_a_truth_value_will_do(guessing: Server) -> None:
    reply = guessing.post("/v1/chat/completions", {**CHAT, "provenance": "yes"})
    assert reply.status_code == 400 and reply.json()["error"]["param"] == "provenance"
