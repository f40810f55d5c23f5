"""Tools for a model whose template shows none: told in a system message, called as text, read back as calls."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest

from phasewise.errors import UserError
from phasewise.llm import LLM
from phasewise.serve.app import create_app
from phasewise.serve.guard.policy import ServePolicy
from phasewise.serve.tools.generic import render, spelled
from tests.serve.playing import checkpoint, play
from tests.serve.running import Server
from tests.serve.tiny_chat import chat_checkpoint

WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {
    "type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"],
    "additionalProperties": False}}}  # fmt: skip
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "%s"}}\n</tool_call>'
RESULT = {"role": "tool", "tool_call_id": "a"}


def called(city: str) -> dict[str, Any]:
    return {"id": "a", "type": "function", "function": {"name": "weather", "arguments": json.dumps({"city": city})}}


@pytest.fixture(scope="module")
def bare() -> Iterator[Server]:
    with Server(tool_format="generic", faults={"plays": True}) as server:
        yield server


def asked(server: Server, text: str, stream: bool = False, **more: Any) -> tuple[str, list[tuple[str, Any]], str]:
    """Content, calls and the reason of the end."""
    messages = more.pop("messages", [{"role": "user", "content": play(text)}])
    body = {"model": "tiny", "messages": messages, "tools": [WEATHER], "temperature": 0, "max_tokens": 150, **more}
    client = server.client()
    if not stream:
        (choice,) = client.chat.completions.create(**body).choices
        calls = [(c.function.name, json.loads(c.function.arguments)) for c in choice.message.tool_calls or ()]
        return choice.message.content or "", calls, choice.finish_reason
    content, found, reason = "", list[list[str]](), ""
    for chunk in client.chat.completions.create(stream=True, **body):
        for choice in chunk.choices:
            content, reason = content + (choice.delta.content or ""), choice.finish_reason or reason
            for call in choice.delta.tool_calls or ():
                if call.function.name:
                    found.append([call.function.name, ""])
                found[-1][1] += call.function.arguments or ""
    return content, [(name, json.loads(arguments)) for name, arguments in found], reason


@pytest.mark.parametrize("stream", [False, True])
def test_calls_are_read_back(bare: Server, stream: bool) -> None:
    oslo, rome = ("weather", {"city": "Oslo"}), ("weather", {"city": "Rome"})
    assert asked(bare, f"So: {CALL % 'Oslo'}{CALL % 'Rome'}", stream) == ("So:", [oslo, rome], "tool_calls")
    assert asked(bare, "No.", stream) == ("No.", [], "stop")
    one = asked(bare, f"{CALL % 'Oslo'}{CALL % 'Rome'}", stream, parallel_tool_calls=False)
    assert one == ("", [oslo], "tool_calls")
    forced = {"type": "function", "function": {"name": "weather"}}
    for choice in ("required", forced):
        _, calls, reason = asked(bare, "No.", stream, tool_choice=choice, parallel_tool_calls=False)
        assert reason == "tool_calls" and calls[0] in (oslo, rome) and len(calls) == 1
    history = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "", "tool_calls": [called("Oslo")]},
               {**RESULT, "content": play("It rains.")}]  # fmt: skip
    assert asked(bare, "", stream, messages=history) == ("It rains.", [], "stop")


def test_what_the_model_is_shown(bare: Server) -> None:
    def shown(**body: Any) -> str:
        tokens = bare.post("/tokenize", {"messages": [{"role": "user", "content": "?"}], **body}).json()["tokens"]
        return str(bare.post("/detokenize", {"tokens": tokens}).json()["prompt"])

    text = shown(tools=[WEATHER])
    assert text.startswith("<|im_start|>system") and json.dumps(WEATHER["function"]) in text
    assert shown() == shown(tools=[WEATHER], tool_choice="none") != text


def test_conversations_become_text() -> None:
    history = [{"role": "system", "content": "S"}, {"role": "user", "content": "?"},
               {"role": "assistant", "content": "Hm.", "tool_calls": [called("Oslo"), called("Rome")]},
               {**RESULT, "content": "rain"}, {**RESULT, "content": [{"type": "text", "text": "sun"}]},
               {"role": "user", "content": "!"}]  # fmt: skip
    plain = spelled(history)
    assert [message["role"] for message in plain] == ["system", "user", "assistant", "user", "user"]
    assert plain[2]["content"] == f"Hm.\n{CALL % 'Oslo'}\n{CALL % 'Rome'}"
    assert plain[3]["content"] == "<tool_response>\nrain\n</tool_response>\n<tool_response>\nsun\n</tool_response>"
    assert render(lambda messages: str(messages[0]["content"]), history, [WEATHER]).startswith("S\n\nYou can call")


def test_a_template_without_system_messages_tells_the_user() -> None:
    def write(messages: Sequence[Mapping[str, Any]]) -> str:
        if messages[0]["role"] == "system":
            raise UserError("no such role")
        return str(messages[0]["content"])

    assert render(write, [{"role": "user", "content": "?"}], [WEATHER]).endswith("\n\n?")
    with pytest.raises(UserError, match="no such role"):
        render(write, [{"role": "system", "content": "S"}, {"role": "user", "content": "?"}], [WEATHER])


def test_models_that_have_their_own_format_are_refused() -> None:
    with pytest.raises(UserError, match="--tool-format generic is for models whose chat template shows no tools"):
        create_app(LLM(str(checkpoint("hermes"))), policy=ServePolicy(tool_format="generic"))
    create_app(LLM(str(chat_checkpoint())), policy=ServePolicy(tool_format="generic"))
