"""LangChain's ChatOpenAI as it comes: tools, structured output by both methods, streams, batches, embeddings."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import pytest
from pydantic import BaseModel, SecretStr

from tests.lazy import lazy
from tests.serve.playing import play
from tests.serve.running import PATIENCE, Server

pytest.importorskip("llguidance")
langchain: Any = lazy("langchain_openai")
messages: Any = lazy("langchain_core.messages")
tools: Any = lazy("langchain_core.tools")
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


class Animal(BaseModel):
    """An animal."""

    name: Literal["fox", "dog"]
    tame: bool


def weather(city: Literal["Oslo", "Rome"]) -> str:
    """The weather in a city."""
    return f"Rain in {city}."


def chat(server: Server, **options: Any) -> Any:
    options = {"max_tokens": 600, "temperature": 0, "timeout": PATIENCE, "max_retries": 0, **options}
    return langchain.ChatOpenAI(model="tiny", base_url=f"{server.url}/v1", api_key=SecretStr("none"), **options)


def test_messages_go_and_come(hermes: Server) -> None:
    asked = [("system", "Be brief."), ("human", play("It rains."))]
    answer = chat(hermes).invoke(asked)
    assert answer.content == "It rains." and answer.response_metadata["finish_reason"] == "stop"
    assert answer.usage_metadata["output_tokens"] > 1
    pieces = list(chat(hermes).stream(asked))
    assert "".join(piece.content for piece in pieces) == "It rains." and len(pieces) > 3
    both = chat(hermes).batch([play("One."), play("Two.")])
    assert [each.content for each in both] == ["One.", "Two."]

    async def later() -> list[str]:
        return [piece.content async for piece in chat(hermes).astream(asked)]

    assert "".join(asyncio.run(later())) == "It rains."


def test_tools_are_called_and_answered(hermes: Server) -> None:
    model = chat(hermes).bind_tools([tools.tool(weather)])
    talk: list[Any] = [messages.HumanMessage(play(f"So:\n{CALL}"))]
    answer = model.invoke(talk)
    ((name, arguments),) = [(call["name"], call["args"]) for call in answer.tool_calls]
    assert (answer.content, name, arguments) == ("So:", "weather", {"city": "Oslo"})
    whole = None
    for piece in model.stream(talk):
        whole = piece if whole is None else whole + piece
    assert whole is not None and [(call["name"], call["args"]) for call in whole.tool_calls] == [(name, arguments)]
    result = tools.tool(weather).invoke(answer.tool_calls[0])
    result.content = play(result.content)
    assert model.invoke([*talk, answer, result]).content == "Rain in Oslo."


@pytest.mark.parametrize("choice", ["any", "weather", True])
def test_a_call_that_has_to_be(hermes: Server, choice: Any) -> None:
    model = chat(hermes).bind_tools([tools.tool(weather)], tool_choice=choice, strict=True, parallel_tool_calls=False)
    (call,) = model.invoke("the fox").tool_calls
    assert call["name"] == "weather" and call["args"]["city"] in ("Oslo", "Rome")


@pytest.mark.parametrize("strict", [None, True])
@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output(hermes: Server, method: str, strict: bool | None) -> None:
    model = chat(hermes).with_structured_output(Animal, method=method, strict=strict)
    asked = play('{"name": "fox", "tame": false}') if method == "json_schema" else "the quick brown fox"
    assert isinstance(model.invoke(asked), Animal)
    assert isinstance(list(model.stream(asked))[-1], Animal)


def test_structured_output_with_its_message_and_json(hermes: Server) -> None:
    found = chat(hermes).with_structured_output(Animal, include_raw=True).invoke("the fox")
    assert isinstance(found["parsed"], Animal) and found["parsing_error"] is None
    model = chat(hermes).with_structured_output(Animal, method="json_mode")
    assert model.invoke(play('{"name": "fox", "tame": false}')) == Animal(name="fox", tame=False)


def test_responses_api_and_logprobs(hermes: Server) -> None:
    answer = chat(hermes, use_responses_api=True).invoke(play("It rains."))
    assert answer.text == "It rains."
    told = chat(hermes, logprobs=True, top_logprobs=2, seed=1, stop_sequences=["xyz"], n=1).invoke(play("It rains."))
    assert len(told.response_metadata["logprobs"]["content"]) == told.usage_metadata["output_tokens"]


def test_completions_and_embeddings(hermes: Server) -> None:
    options = {"base_url": f"{hermes.url}/v1", "api_key": SecretStr("none"), "timeout": PATIENCE, "model": "tiny"}
    assert langchain.OpenAI(max_tokens=4, temperature=0, **options).invoke("the quick brown")
    embedded = langchain.OpenAIEmbeddings(check_embedding_ctx_length=False, **options).embed_documents(["a", "fox"])
    assert len(embedded) == 2 and len(embedded[0]) == len(embedded[1]) > 8
