"""Streams towards clients of every kind, without a socket in between."""

from __future__ import annotations

import asyncio
import json
from collections.abc import MutableMapping
from typing import Any

import pytest

from phasewise.llm import LLM
from phasewise.request.params import Params
from phasewise.serve.completions.answer import Answer, GenerationRequest
from phasewise.serve.completions.schema import GREEDY_BELOW, CompletionAsk, read
from phasewise.serve.completions.stream import EventStream
from phasewise.serve.completions.wire import CHAT, COMPLETION, AnswerWriter
from phasewise.serve.failures import ApiError
from phasewise.serve.loop import EngineLoop
from tests.serve.tiny_chat import chat_checkpoint

Message = MutableMapping[str, Any]


def stream(
    llm: LLM,
    order: GenerationRequest,
    gates: list[asyncio.Event],
    wire: AnswerWriter,
    leave: asyncio.Event | None = None,
) -> list[bytes]:
    """The bodies that were sent; the i-th waits for the i-th gate. The client goes away when `leave` is set."""
    bodies: list[bytes] = []

    async def send(message: Message) -> None:
        if message["type"] == "http.response.body":
            if len(bodies) < len(gates):
                await gates[len(bodies)].wait()
            bodies.append(message["body"])

    async def receive() -> Message:
        await (leave or asyncio.Event()).wait()
        return {"type": "http.disconnect"}

    async def main() -> None:
        engine = EngineLoop(llm.engine, 100)
        engine.start()
        answer = Answer(llm, engine, order)
        await answer.start()
        response = asyncio.create_task(EventStream(answer, wire)({}, receive, send))
        while engine.live:  # everything has left although the client has read nothing yet
            if leave is not None and bodies:
                leave.set()
            await asyncio.sleep(0.01)
        for gate in gates:
            gate.set()
        async with asyncio.timeout(10):
            await response
        await asyncio.to_thread(engine.stop)

    asyncio.run(main())
    return bodies


def events(bodies: list[bytes]) -> list[Any]:
    lines = [line for line in b"".join(bodies).decode().split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines) and lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def test_a_client_that_does_not_read_gets_all_it_missed_at_once(llm: LLM) -> None:
    params = Params(max_tokens=50, ignore_eos=True)
    order = GenerationRequest([llm.encode("the fox")], params, stream=True)
    bodies = stream(llm, order, [asyncio.Event()], AnswerWriter(COMPLETION, "tiny"))
    assert len(bodies) <= 4  # the first tokens, the rest, the end
    assert "".join(event["choices"][0]["text"] for event in events(bodies)) == llm.generate("the fox", params)[0].text


def test_one_write_per_step_whatever_the_number_of_choices(llm: LLM) -> None:
    order = GenerationRequest(
        [llm.encode("the")], Params(max_tokens=10, ignore_eos=True, temperature=2), n=6, stream=True
    )
    bodies = stream(llm, order, [], AnswerWriter(CHAT, "tiny"))
    assert len(bodies) <= 11
    assert {event["choices"][0]["index"] for event in events(bodies)} == set(range(6))


@pytest.mark.parametrize(
    "verbs",
    [{"draft": "prompt_lookup"}, {"place": "disaggregated"}, {"schedule": "layered"}, {"schedule": "prefill_first"}],
)
def test_methods_do_not_change_what_is_streamed(llm: LLM, verbs: dict[str, str]) -> None:
    """Several tokens in a step, several engines: the pieces still are the plain text, each choice its own."""
    params, prompts = Params(max_tokens=40, ignore_eos=True), ["the fox the fox the", "dog dog dog", "quick"]
    expected = [output.text for output in llm.generate(prompts, params)]
    other = LLM(str(chat_checkpoint()), **verbs)
    order = GenerationRequest([llm.encode(prompt) for prompt in prompts], params, n=2, stream=True)
    texts = dict.fromkeys(range(6), "")
    for event in events(stream(other, order, [], AnswerWriter(COMPLETION, "tiny"))):
        texts[event["choices"][0]["index"]] += event["choices"][0]["text"]
    assert list(texts.values()) == [text for text in expected for _ in range(2)]
    assert other.engine.idle and other.engine.kv_bytes == other.engine.prefix_bytes


def test_a_client_that_leaves_while_writing_is_blocked(llm: LLM) -> None:
    order = GenerationRequest([llm.encode("the")], Params(max_tokens=1900, ignore_eos=True), stream=True)
    never = asyncio.Event()
    bodies = stream(llm, order, [_open(), never], AnswerWriter(CHAT, "tiny"), leave=asyncio.Event())
    assert len(bodies) < 10
    assert llm.engine.idle and llm.engine.kv_bytes == llm.engine.prefix_bytes


def _open() -> asyncio.Event:
    gate = asyncio.Event()
    gate.set()
    return gate


def test_defaults_are_openais() -> None:
    params = read(CompletionAsk, b'{"prompt": "a"}').params()
    assert (params.max_tokens, params.temperature, params.top_p, params.top_k) == (16, 1.0, 1.0, 0)
    assert read(CompletionAsk, b'{"prompt": "a", "max_tokens": null, "temperature": null}').params().max_tokens == 16
    assert read(CompletionAsk, f'{{"prompt": "a", "temperature": {GREEDY_BELOW / 2}}}'.encode()).params().greedy


def test_zero_is_not_false_and_one_is_not_true() -> None:
    read(CompletionAsk, b'{"prompt": "a", "logprobs": false, "best_of": 1}')
    for field in (b'"use_beam_search": 0', b'"length_penalty": true', b'"logprobs": true', b'"best_of": true'):
        with pytest.raises(ApiError):
            read(CompletionAsk, b'{"prompt": "a", ' + field + b"}")
