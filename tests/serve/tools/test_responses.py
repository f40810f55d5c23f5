"""/v1/responses through the real `openai` package."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from phasewise.serve.failures import ApiError
from phasewise.serve.responses.endpoint import Stored
from tests.serve.playing import checkpoint, play
from tests.serve.running import Server

WEATHER: Any = {"type": "function", "name": "weather", "parameters": {"type": "object"}, "strict": False}
CLOCK: Any = {"type": "function", "name": "clock", "parameters": None, "strict": None}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


def asked(text: str, **more: Any) -> dict[str, Any]:
    return {"model": "tiny", "input": play(text), "max_output_tokens": 200, **more}


def told(response: Any) -> list[tuple[str, ...]]:
    """Its items in short."""
    found: list[tuple[str, ...]] = []
    for item in response.output:
        if item.type == "function_call":
            found.append(("call", item.name, item.arguments))
        else:
            found.append((item.type, "".join(part.text for part in item.content)))
    return found


def streamed(server: Server, **body: Any) -> Any:
    with server.client().responses.stream(**body) as stream:
        for event in stream:
            assert event.type
        return stream.get_final_response()


USE = ("call", "weather", '{"city": "Oslo"}')


@pytest.mark.parametrize(
    ("text", "more", "items", "status"),
    [
        ("It rains.", {"max_output_tokens": 2}, [("message", "It")], "incomplete"),
        (f"Wait.\n{CALL}{CALL}", {"tools": [WEATHER, CLOCK]}, [("message", "Wait."), USE, USE], "completed"),
        (CALL, {"tools": [WEATHER], "tool_choice": "none"}, [("message", CALL)], "completed"),
        (CALL, {"tools": [CLOCK, WEATHER], "tool_choice": {"type": "function", "name": "weather"}}, [USE],
         "completed"),
        (CALL + CALL, {"tools": [WEATHER], "parallel_tool_calls": False}, [USE], "completed"),
        ("", {}, [], "completed"),
    ],
)  # fmt: skip
def test_items_whole_and_streamed(
    hermes: Server, text: str, more: dict[str, Any], items: list[tuple[str, ...]], status: str
) -> None:
    body = asked(text, **more)
    whole = hermes.client().responses.create(**body)
    assert (told(whole), whole.status) == (items, status)
    assert whole.output_text == "".join(item[1] for item in items if item[0] == "message")
    assert (whole.incomplete_details is None) == (status == "completed") and whole.error is None
    assert whole.usage and whole.usage.total_tokens == whole.usage.input_tokens + whole.usage.output_tokens
    events = list(hermes.client().responses.create(stream=True, **body))
    last: Any = events[-1]
    assert last.type == f"response.{status}" and (told(last.response), last.response.status) == (items, status)
    if status == "completed":
        assert told(streamed(hermes, **body)) == items


def test_events_are_typed_and_in_order(thinking: Server) -> None:
    text = f"<think>\nHm, hm.\n</think>\n\nSo:\n{CALL}"
    events: list[Any] = list(thinking.client().responses.create(stream=True, **asked(text, tools=[WEATHER])))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    assert [kind for i, kind in enumerate(kinds) if i == 0 or kind != kinds[i - 1]] == [
        "created", "in_progress",
        "output_item.added", "reasoning_text.delta", "reasoning_text.done", "output_item.done",
        "output_item.added", "content_part.added", "output_text.delta", "output_text.done", "content_part.done",
        "output_item.done",
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done",
        "completed",
    ]  # fmt: skip
    final = events[-1].response
    assert told(final) == [("reasoning", "Hm, hm."), ("message", "So:"), USE]
    for event in events:
        if event.type.endswith(".delta"):
            assert final.output[event.output_index].id == event.item_id
    for kind, whole in (("output_text", "So:"), ("reasoning_text", "Hm, hm."), ("function_call_arguments", USE[2])):
        assert "".join(event.delta for event in events if event.type == f"response.{kind}.delta") == whole
    assert all(item.status == "completed" for item in final.output)


def test_a_response_goes_on_from_a_stored_one(hermes: Server) -> None:
    client = hermes.client()
    for stream in (False, True):
        body = asked(CALL, tools=[WEATHER], instructions="Be brief.")
        first = streamed(hermes, **body) if stream else client.responses.create(**body)
        result: Any = {"type": "function_call_output", "call_id": first.output[0].call_id, "output": play("Rain.")}
        second = client.responses.create(
            model="tiny", input=[result], previous_response_id=first.id, tools=[WEATHER], max_output_tokens=50
        )
        assert second.output_text == "Rain." and second.previous_response_id == first.id
        third = client.responses.create(
            model="tiny", input=[{"role": "user", "content": play("Bye.")}], previous_response_id=second.id
        )
        assert third.output_text == "Bye."
        spelt: Any = [{"role": "user", "content": body["input"]}, *first.model_dump()["output"], result]
        again = client.responses.create(model="tiny", input=spelt, tools=[WEATHER], max_output_tokens=50)
        assert again.usage and second.usage and again.usage.input_tokens == second.usage.input_tokens


def test_stored_responses_can_be_read_and_deleted(hermes: Server) -> None:
    client = hermes.client()
    made = client.responses.create(**asked("Hello", metadata={"a": "b"}))
    assert made.store is True and client.responses.retrieve(made.id).model_dump() == made.model_dump()
    client.responses.delete(made.id)
    for ask in (lambda: client.responses.retrieve(made.id), lambda: client.responses.delete(made.id)):
        with pytest.raises(openai.NotFoundError):
            ask()
    loose = client.responses.create(**asked("Hello", store=False))
    assert loose.store is False
    with pytest.raises(openai.NotFoundError) as refused:
        client.responses.create(**asked("Hello", previous_response_id=loose.id))
    assert refused.value.param == "previous_response_id"


def test_the_oldest_make_way() -> None:
    body = {"id": "r", "output": []}
    size = len(json.dumps({"items": [], "body": body}))
    stored = Stored(3 * size)
    for id in "abc":
        assert stored.put(id, [], body)
    stored.get("a")
    assert stored.put("d", [], body) and stored.bytes == 3 * size
    with pytest.raises(ApiError, match="'b'"):
        stored.get("b")
    assert not stored.put("e", [{"content": "x" * 3 * size}], body) and stored.get("a")
    for id in "acd":
        stored.drop(id)
    assert stored.bytes == 0


WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"input": []}, "input", "no items"),
    ({"input": 3}, "input", "input"),
    ({"input": [{"type": "web_search_call"}]}, "input", "input.0"),
    ({"input": [{"role": "robot", "content": "a"}]}, "input", "input.0"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input", "input_text"),
    ({"input": [{"type": "function_call_output", "call_id": "a", "output": 3}]}, "input", "input.0"),
    ({"tools": [{"type": "file_search"}]}, "tools", "file_search"),
    ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice", "needs tools"),
    ({"tools": [WEATHER | {"strict": "yes"}]}, "tools", "strict"),
    ({"tool_choice": {"type": "file_search"}}, "tool_choice", "tool_choice"),
    ({"max_output_tokens": 0}, "max_output_tokens", "max_output_tokens"),
    ({"background": True}, "background", "not supported"),
    ({"include": ["message.output_text.logprobs"]}, "include", "not supported"),
    ({"reasoning": {"effort": "hard"}}, "reasoning", "effort"),
    ({"reasoning": {"depth": 3}}, "reasoning", "depth"),
    ({"text": {"verbosity": "loud"}}, "text", "verbosity"),
    ({"tools": [{"type": "custom", "name": "a", "format": {"type": "xml"}}]}, "tools", "tools.0: format"),
    ({"tools": [{"type": "namespace", "name": "a", "tools": [{"type": "function"}]}]}, "tools", "tools.0: a namespace"),
    ({"tools": [{"type": "namespace", "name": "a", "tools": [{"type": "mcp", "name": "b"}]}]}, "tools", "'mcp'"),
    ({"text": {"format": {"type": "xml"}}}, "text", "text.format has the type 'xml'"),
    ({"text": {"format": {"type": "json_schema", "name": "a", "schema": {"not": {}}}}}, "text", "not"),
    ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "text", "needs json_schema"),
    ({"truncation": "auto"}, "truncation", "not supported"),
    ({"previous_response_id": "resp_none"}, "previous_response_id", "resp_none"),
    ({"model": "other"}, "model", "other"),
]


@pytest.mark.parametrize(("more", "param", "words"), WRONG)
def test_what_is_wrong_is_named(hermes: Server, more: dict[str, Any], param: str, words: str) -> None:
    answer = hermes.post("/v1/responses", {**asked("x"), **more})
    assert answer.status_code == (404 if param in ("previous_response_id", "model") else 400), answer.text
    error = answer.json()["error"]
    assert error["param"] == param and words in error["message"]


def test_a_stream_that_breaks_says_so() -> None:
    with Server(model=checkpoint("hermes"), faults={"plays": True, "break_at": 12}) as server:
        events: list[Any] = list(server.client().responses.create(stream=True, **asked("a" * 100)))
        assert events[-1].type == "response.failed" and "engine has failed" in events[-1].response.error.message
