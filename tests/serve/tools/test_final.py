"""The format of the final answer, after reasoning and instead of calls: chat, streams and /v1/responses."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import openai
import pytest

from phasewise.serve.tools.final import around, blanks_may_come_first
from phasewise.serve.tools.final import calls as held
from phasewise.serve.tools.formats import FORMATS
from phasewise.serve.tools.reasoning import TAGS
from phasewise.serve.tools.spelling import Spelling
from tests.serve.running import Server
from tests.serve.tools.test_chat_tools import CALL, STRICT, asked, calls, streamed
from tests.serve.tools.test_optional import allows, tokenizer

pytest.importorskip("llguidance")
SCHEMA = {
    "type": "object",
    "properties": {"sum": {"type": "integer"}},
    "required": ["sum"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
ANSWER = '{"sum": 12}'
OPENED = {"chat_template_kwargs": {"open": "<think>\n"}}
TOOLS: Any = [
    {"function": {"name": "weather", "strict": True, "parameters": {
        "type": "object", "properties": {"city": {"enum": ["Oslo"]}}, "required": ["city"],
        "additionalProperties": False}}},
    {"function": {"name": "clock"}},
]  # fmt: skip
CALLS = {
    "hermes": ['<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'] * 2,
    "mistral": ['[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Oslo"}}]'],
    "llama3": ['{"name": "weather", "parameters": {"city": "Oslo"}}', '{"name": "clock", "parameters": {}}'],
    "pythonic": ['[weather(city="Oslo"), clock()]'],
    "qwen3_coder": ["<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n</function>\n</tool_call>"],
    "gemma": ['```tool_code\nweather(city="Oslo")\n```'],
}


def allowed(how: dict[str, Any], text: str) -> bool:
    return allows(how, tokenizer().encode(text, add_special=False))


@pytest.mark.parametrize("tags", ["", "think", "think opened", "mistral"])
@pytest.mark.parametrize("name", CALLS)
def test_calls_or_the_answer(name: str, tags: str) -> None:
    """Whichever comes, reasoning may come first, and nothing else may."""
    format, marks, opened = FORMATS[name], TAGS.get(tags.partition(" ")[0]), tags.endswith("opened")
    ids = {
        word: i for word in format.tokens if (i := tokenizer().id(word)) in tokenizer().special_ids and i is not None
    }
    calls_held = held(TOOLS, format, format.opening, Spelling(ids), single=False)
    asks = {"json_schema": SCHEMA, **around(marks, opened, True, calls_held, Spelling(ids))}
    before = "" if marks is None else f"a {ANSWER}{marks.close}\n\n" if opened else f"{marks.open}a{marks.close}"
    for text in (ANSWER, *CALLS[name]):
        assert allowed(asks, before + text), before + text
        assert allowed(asks, text) == (not opened)
        assert not allowed(asks, f"{before}Well: {text}") and not allowed(asks, f"{before}{text}{ANSWER}")
    assert not allowed(asks, before) and not allowed(asks, before + '{"sum": "12"}')
    assert not any(allowed(asks, before + text.replace("Oslo", "Rome")) for text in CALLS[name] if "Oslo" in text)


@pytest.mark.parametrize(
    ("ask", "text", "other"),
    [({"choice": [" yes", "no"]}, " yes", "yes"), ({"regex": "\n?[a-c]+"}, "\nab", "\n\nab"),
     ({"grammar": 'start: " "* "x"'}, "  x", "\nx"), ({"choice": ["yes"]}, "yes", " yesno"),
     ({"grammar": 'root ::= "a" | "b" root'}, "bba", "bb")],
)  # fmt: skip
def test_any_kind_of_answer_to_the_letter(ask: dict[str, Any], text: str, other: str) -> None:
    gap = not blanks_may_come_first(ask)
    asks = {**ask, **around(TAGS["think"], False, gap, None, Spelling({}))}
    assert allowed(asks, text) and not allowed(asks, other)
    assert allowed(asks, f"<think>{other}</think>{text}") and not allowed(asks, f"<think></think>{other}")
    assert allowed(asks, f"\n<think>\n</think>\n\n{text}") == gap


THOUGHT = "<think>\nFive and seven.\n</think>\n\n"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("opened", [False, True])
def test_the_format_begins_where_reasoning_ends(thinking: Server, opened: bool, stream: bool) -> None:
    text = (THOUGHT.removeprefix("<think>\n") if opened else THOUGHT) + ANSWER
    body = asked(text, tools=None, response_format=FORMAT, extra_body=OPENED if opened else {})
    if stream:
        deltas = [chunk.choices[0].delta for chunk in thinking.client().chat.completions.create(stream=True, **body)]
        content = "".join(delta.content or "" for delta in deltas)
        reasoning = "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas)
    else:
        message: Any = thinking.client().chat.completions.create(**body).choices[0].message
        content, reasoning = message.content, message.reasoning_content
    assert (content, reasoning) == (ANSWER, "Five and seven.")


def test_reasoning_need_not_come_and_may_be_over(thinking: Server) -> None:
    closed = {"chat_template_kwargs": {"open": "<think>\n\n</think>\n\n"}}
    for more in ({}, closed):
        body = asked(ANSWER, tools=None, response_format=FORMAT, extra_body=more)
        message: Any = thinking.client().chat.completions.create(**body).choices[0].message
        assert message.content == ANSWER and not hasattr(message, "reasoning_content")


@pytest.mark.parametrize("field", [{"structured_outputs": {"choice": [" yes", "no"]}}, {"guided_regex": " ?yes"}])
def test_white_space_of_the_answer_is_its_own(thinking: Server, field: dict[str, Any]) -> None:
    message: Any = (
        thinking.client().chat.completions.create(**asked("<think>a</think> yes", tools=None, extra_body=field))
    ).choices[0].message  # fmt: skip
    assert (message.content, message.reasoning_content) == (" yes", "a")


def test_responses_too(thinking: Server) -> None:
    content = asked(THOUGHT + ANSWER)["messages"]
    text: Any = {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}
    made = thinking.client().responses.create(model="tiny", input=content, temperature=0, text=text)
    assert made.output_text == ANSWER and [item.type for item in made.output] == ["reasoning", "message"]


@pytest.mark.parametrize("tools", [None, STRICT])
@pytest.mark.parametrize("server", ["hermes", "thinking"])
def test_tools_beside_the_format(server: str, tools: Any, request: pytest.FixtureRequest) -> None:
    """A call is made where the model makes one; the final answer follows the schema."""
    running = request.getfixturevalue(server)
    more = {"response_format": FORMAT, **({} if tools is None else {"tools": tools})}
    thought = THOUGHT if server == "thinking" else ""
    said = '{"city": "Oslo", "days": 2}' if tools else '{"city": "Oslo"}'
    body = asked(thought + CALL.replace('{"city": "Oslo"}', said), **more)
    for choice in (running.client().chat.completions.create(**body).choices[0], streamed(running, **body)):
        assert calls(choice.message) == [("weather", said)] and choice.finish_reason == "tool_calls"
    message = running.client().chat.completions.create(**asked(thought + ANSWER, **more)).choices[0].message
    assert message.content == ANSWER and not message.tool_calls
    free = running.client().chat.completions.create(**asked(f"{thought}It is 12.", max_tokens=400, **more)).choices[0]
    assert "It" not in (free.message.content or ""), "neither a call nor an answer of the schema"
    if free.finish_reason == "stop":
        jsonschema.validate(json.loads(free.message.content), SCHEMA)


def test_a_call_that_must_be_made_leaves_no_room_for_the_format(hermes: Server) -> None:
    for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
        body = asked(CALL, tool_choice=choice, response_format=FORMAT)
        message = hermes.client().chat.completions.create(**body).choices[0].message
        assert calls(message) == [("weather", '{"city": "Oslo"}')]


def test_a_format_that_cannot_be_held_is_still_refused_by_name(hermes: Server) -> None:
    wrong: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": 2**53 + 1}}}
    with pytest.raises(openai.BadRequestError, match=r"const=9007199254740993 is beyond 2\^53") as caught:
        hermes.client().chat.completions.create(**asked("", response_format=wrong))
    assert caught.value.body["param"] == "response_format"  # type: ignore[index]
    bounds = {"type": "object", "properties": {"id": {"type": "integer", "maximum": 2**63 - 1}}}
    strict: Any = {"type": "function", "function": {"name": "f", "parameters": bounds, "strict": True}}
    for more in ({}, {"response_format": FORMAT}, {"tool_choice": "required"}):
        with pytest.raises(openai.BadRequestError, match=r"f: .*maximum=9223372036854775807 is beyond") as caught:
            hermes.client().chat.completions.create(**asked("", tools=[strict], **more))
        assert caught.value.body["param"] == "tools"  # type: ignore[index]
