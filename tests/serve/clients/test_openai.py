"""The whole of the `openai` package's surface that people program against: sync, async, helpers, parsing, tools."""

from __future__ import annotations

import asyncio
import inspect
import json
import operator
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

from phasewise.serve.completions.fields import CHAT_REFUSED, COMPLETION_REFUSED, HARMLESS, Harmless
from phasewise.serve.completions.schema import Ask, ChatAsk, CompletionAsk
from tests.serve.playing import play
from tests.serve.running import Server

pytest.importorskip("llguidance")
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
WEATHER: Any = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
USER: Any = [{"role": "user", "content": "the quick brown fox"}]
FOX = '{"name": "fox", "tame": false, "kin": ["a", "b"]}'  # short, where random weights would write on


class Animal(BaseModel):
    """What answers are parsed into: few texts are such an animal, so a model of random weights needs few tokens."""

    name: Literal["fox", "dog"]
    tame: bool
    kin: list[Literal["a", "b"]]


class Weather(BaseModel):
    city: Literal["Oslo", "Rome"]
    days: Literal[1, 2, 3]


def said(text: str) -> Any:
    return [{"role": "user", "content": play(text)}]


def told(events: list[Any], kind: str) -> str:
    return "".join(event.delta for event in events if event.type == kind)


def test_the_streaming_helper_tells_content_and_the_end(hermes: Server) -> None:
    with hermes.client().chat.completions.stream(model="tiny", messages=said("It rains, é.")) as stream:
        events: list[Any] = list(stream)
        final = stream.get_final_completion()
    assert told(events, "content.delta") == final.choices[0].message.content == "It rains, é."
    (done,) = [event for event in events if event.type == "content.done"]
    assert done.content == "It rains, é." and final.choices[0].finish_reason == "stop"


def test_the_streaming_helper_tells_calls(hermes: Server) -> None:
    body: dict[str, Any] = {"model": "tiny", "messages": said(f"So:\n{CALL}"), "tools": [WEATHER]}
    with hermes.client().chat.completions.stream(**body, stream_options={"include_usage": True}) as stream:
        events: list[Any] = list(stream)
        final = stream.get_final_completion()
    (done,) = [event for event in events if event.type == "tool_calls.function.arguments.done"]
    assert (done.name, json.loads(done.arguments)) == ("weather", {"city": "Oslo"})
    pieces = [event.arguments_delta for event in events if event.type == "tool_calls.function.arguments.delta"]
    assert "".join(pieces) == done.arguments and len(pieces) > 1
    assert final.choices[0].finish_reason == "tool_calls" and final.usage and final.usage.completion_tokens > 10


def test_answers_are_parsed_whole_and_streamed(hermes: Server) -> None:
    body: dict[str, Any] = {"model": "tiny", "messages": said(FOX), "max_tokens": 400, "temperature": 0.8, "seed": 3}
    whole = hermes.client().chat.completions.parse(**body, response_format=Animal).choices[0]
    with hermes.client().chat.completions.stream(**body, response_format=Animal) as stream:
        part = stream.get_final_completion().choices[0]
    assert isinstance(whole.message.parsed, Animal) and part.message.parsed == whole.message.parsed


def test_calls_are_parsed_into_their_models(hermes: Server) -> None:
    tool = openai.pydantic_function_tool(Weather, name="weather")
    assert tool["function"]["strict"] is True
    for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
        done: Any = hermes.client().chat.completions.parse(
            model="tiny", messages=USER, tools=[tool], tool_choice=choice, max_tokens=600, temperature=0,
            parallel_tool_calls=False,
        )  # fmt: skip
        (call,) = done.choices[0].message.tool_calls
        assert isinstance(call.function.parsed_arguments, Weather) and done.choices[0].finish_reason == "tool_calls"


def test_responses_are_parsed_whole_and_streamed(hermes: Server) -> None:
    body: dict[str, Any] = {"model": "tiny", "input": play(FOX), "max_output_tokens": 600}
    body |= {"temperature": 0}
    whole = hermes.client().responses.parse(**body, text_format=Animal)
    with hermes.client().responses.stream(**body, text_format=Animal) as stream:
        events: list[Any] = list(stream)
        part = stream.get_final_response()
    assert isinstance(whole.output_parsed, Animal) and part.output_parsed == whole.output_parsed
    assert told(events, "response.output_text.delta") == whole.output_text
    assert whole.text and whole.text.format and whole.text.format.type == "json_schema"


def test_other_formats_of_responses(hermes: Server) -> None:
    client = hermes.client()
    body: dict[str, Any] = {"model": "tiny", "max_output_tokens": 600, "temperature": 0}
    format: Any = {"type": "json_schema", "name": "a", "schema": {"enum": ["yes", "no"]}}
    assert client.responses.create(input="x", text={"format": format}, **body).output_text in ('"yes"', '"no"')
    plain = client.responses.create(input=play("It rains."), text={"format": {"type": "text"}}, **body)
    assert plain.output_text == "It rains."
    with pytest.raises(openai.BadRequestError, match="text.format") as refused:
        client.responses.create(input="x", text={"format": {"type": "json_schema", "name": "a", "schema": 3}}, **body)
    assert refused.value.param == "text"


def test_responses_call_tools_that_are_parsed(hermes: Server) -> None:
    tool: Any = {"type": "function", "name": "weather", "strict": True, "parameters": Weather.model_json_schema()}
    done = hermes.client().responses.parse(
        model="tiny", input="the fox", tools=[tool], tool_choice="required", temperature=0, max_output_tokens=600,
        parallel_tool_calls=False,
    )  # fmt: skip
    (call,) = [item for item in done.output if item.type == "function_call"]
    assert Weather.model_validate_json(call.arguments)


def test_the_asynchronous_client_does_the_same(hermes: Server) -> None:
    async def everything() -> None:
        async with hermes.async_client() as client:
            asked: dict[str, Any] = {"model": "tiny", "messages": said(f"So:\n{CALL}"), "tools": [WEATHER]}
            whole = await client.chat.completions.create(**asked)
            text = await client.completions.create(model="tiny", prompt="the", max_tokens=3, temperature=0)
            pieces = [
                chunk.choices[0].text
                async for chunk in await client.completions.create(
                    model="tiny", prompt="the", max_tokens=3, temperature=0, stream=True
                )
            ]
            assert "".join(pieces) == text.choices[0].text
            async with client.chat.completions.stream(**asked) as stream:
                part = await stream.get_final_completion()
            for message in (whole.choices[0].message, part.choices[0].message):
                assert message.tool_calls
                call: Any = message.tool_calls[0]
                assert (message.content, call.function.name) == ("So:", "weather")
            body: dict[str, Any] = {"model": "tiny", "temperature": 0}
            parsed = await client.chat.completions.parse(
                messages=said(FOX), response_format=Animal, max_tokens=600, **body
            )
            assert isinstance(parsed.choices[0].message.parsed, Animal)
            body |= {"input": play(FOX), "max_output_tokens": 600}
            answer = await client.responses.parse(text_format=Animal, **body)
            async with client.responses.stream(text_format=Animal, **body) as events:
                last = await events.get_final_response()
            assert isinstance(answer.output_parsed, Animal) and last.output_parsed == answer.output_parsed
            assert [model.id async for model in client.models.list()] == ["tiny"]
            vectors = await client.embeddings.create(model="tiny", input=["the", "fox"])
            assert len(vectors.data) == 2

    asyncio.run(everything())


@pytest.mark.parametrize(
    ("path", "ask", "refused"),
    [("chat.completions", ChatAsk, CHAT_REFUSED), ("completions", CompletionAsk, COMPLETION_REFUSED)],
)
def test_every_parameter_is_read_or_harmless_or_refused(path: str, ask: type[Ask], refused: Harmless) -> None:
    """None is a stranger: what the package can send is known by its name."""
    create = operator.attrgetter(f"{path}.create")(openai.OpenAI(api_key="none"))
    sent = set(inspect.signature(create).parameters) - {"extra_headers", "extra_query", "extra_body", "timeout"}
    assert len(sent) > 15 and sent <= {*ask.model_fields, *refused, *HARMLESS}
    assert not {*ask.model_fields} & {*refused} and not HARMLESS & {*ask.model_fields, *refused}


def test_an_agent_calls_tools_until_it_has_its_answer(hermes: Server) -> None:
    """The loop that agents are: the model calls, the caller answers, the model says what it makes of it."""
    client, tools = hermes.client(), {"weather": lambda city: play(f"Rain in {city}.")}
    messages: list[Any] = said(CALL)
    for _ in range(3):
        message = client.chat.completions.create(model="tiny", messages=messages, tools=[WEATHER]).choices[0].message
        messages.append(message.model_dump())
        if not message.tool_calls:
            break
        for call in message.tool_calls:
            assert call.type == "function"
            content = tools[call.function.name](**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
    assert [each["role"] for each in messages] == ["user", "assistant", "tool", "assistant"]
    assert messages[-1]["content"] == "Rain in Oslo."
