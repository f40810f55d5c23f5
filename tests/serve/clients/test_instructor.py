"""`instructor` in its modes of tools and of JSON.

Its bounds (of jiter and rich) exclude what a current `openai` needs, so it is no dependency of the tests; they run
where it is installed, in an environment of its own (docs/clients.md).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel, field_validator

from tests.serve.playing import play
from tests.serve.running import Server

instructor = pytest.importorskip("instructor")
pytest.importorskip("llguidance")
GIVEN = '"name": "dog", "tame": true}}\n</tool_call>'  # what follows the opening of a call
DOG, FOX = {"name": "dog", "tame": True}, {"name": "fox", "tame": False}


class Animal(BaseModel):
    """An animal."""

    name: Literal["fox", "dog"]
    tame: bool


class Wild(Animal):
    """An animal that has to be wild: what the schema does not say, and instructor asks again for."""

    @field_validator("tame")
    @classmethod
    def _wild(cls, value: bool) -> bool:
        if value:
            raise ValueError("play:eyJuYW1lIjogImZveCIsICJ0YW1lIjogZmFsc2V9; says how a wild one is spelled")
        return value


def asked(server: Server, mode: str, **body: Any) -> Any:
    client = instructor.from_openai(server.client(), mode=instructor.Mode[mode])
    return client.chat.completions.create(
        **{"model": "tiny", "max_tokens": 600, "temperature": 0, "max_retries": 0, **body}
    )


def test_answers_follow_the_schema_whatever_the_model_would_say(hermes: Server) -> None:
    found = asked(hermes, "JSON_SCHEMA", response_model=Animal, messages=[{"role": "user", "content": "the fox"}])
    assert isinstance(found, Animal)


def test_a_call_is_the_answer(hermes: Server) -> None:
    messages = [{"role": "user", "content": play(GIVEN)}]
    assert asked(hermes, "TOOLS", response_model=Animal, messages=messages).model_dump() == DOG


def test_json_and_several_calls(hermes: Server) -> None:
    json = [{"role": "user", "content": play('{"name": "dog", "tame": true}')}]
    assert asked(hermes, "JSON", response_model=Animal, messages=json).model_dump() == DOG
    call = '<tool_call>\n{"name": "Animal", "arguments": {"name": "fox", "tame": false}}\n</tool_call>'
    both = [{"role": "user", "content": play(call + call)}]
    found = asked(hermes, "PARALLEL_TOOLS", response_model=Iterable[Animal], messages=both)
    assert [each.model_dump() for each in found] == [FOX] * 2


def test_what_does_not_hold_is_asked_again(hermes: Server) -> None:
    messages = [{"role": "user", "content": play('{"name": "dog", "tame": true}')}]
    found = asked(hermes, "JSON_SCHEMA", response_model=Wild, messages=messages, max_retries=2)
    assert found.model_dump() == FOX


def test_streams_and_the_asynchronous_client(hermes: Server) -> None:
    client = instructor.from_openai(hermes.client(), mode=instructor.Mode.JSON_SCHEMA)
    body: dict[str, Any] = {"model": "tiny", "max_tokens": 600, "temperature": 0, "max_retries": 0}
    body["messages"] = [{"role": "user", "content": "the fox"}]
    parts = list(client.chat.completions.create_partial(response_model=Animal, **body))
    whole = client.chat.completions.create(response_model=Animal, **body)
    assert parts[-1].model_dump() == whole.model_dump()

    async def later() -> Any:
        other: openai.AsyncOpenAI = hermes.async_client()
        wrapped = instructor.from_openai(other, mode=instructor.Mode.JSON_SCHEMA)
        return await wrapped.chat.completions.create(response_model=Animal, **body)

    assert asyncio.run(later()).model_dump() == whole.model_dump()
