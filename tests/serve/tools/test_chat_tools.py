"""/v1/chat/completions with tools and reasoning, through the real `openai` package."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import openai
import pytest

from tests.serve.playing import checkpoint, play
from tests.serve.running import Server

WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather", "description": "The weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}  # fmt: skip
CLOCK: Any = {"type": "function", "function": {"name": "clock"}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
TIME = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'


def asked(text: str, **more: Any) -> dict[str, Any]:
    body = {"model": "tiny", "messages": [{"role": "user", "content": play(text)}], "tools": [WEATHER, CLOCK]}
    return {**body, "temperature": 0, "max_tokens": 200, **more}


def calls(message: Any) -> list[tuple[str, str]]:
    return [(call.function.name, call.function.arguments) for call in message.tool_calls or []]


def streamed(server: Server, **body: Any) -> Any:
    """What the package's own accumulator makes of the stream."""
    with server.client().chat.completions.stream(**body) as stream:
        for event in stream:
            assert event.type
        return stream.get_final_completion().choices[0]


@pytest.mark.parametrize(
    ("text", "content", "expected"),
    [
        (CALL, None, [("weather", '{"city": "Oslo"}')]),
        (f"Let me see.\n\n{CALL}\n{TIME}\n", "Let me see.", [("weather", '{"city": "Oslo"}'), ("clock", "{}")]),
        ("It rains.\n", "It rains.\n", []),
        ("<tool_call>nonsense</tool_call>", "<tool_call>nonsense</tool_call>", []),
    ],
)
def test_calls_are_told_apart(hermes: Server, text: str, content: str | None, expected: list[tuple[str, str]]) -> None:
    body = asked(text)
    whole = hermes.client().chat.completions.create(**body).choices[0]
    assert (whole.message.content, calls(whole.message)) == (content, expected)
    assert whole.finish_reason == ("tool_calls" if expected else "stop")
    assert all(len(call.id) == 9 and call.type == "function" for call in whole.message.tool_calls or [])
    part = streamed(hermes, **body)
    assert (part.message.content or None, calls(part.message)) == (content, expected)
    assert part.finish_reason == whole.finish_reason


def test_a_stream_tells_the_name_once_and_arguments_as_they_come(hermes: Server) -> None:
    text = CALL.replace("Oslo", "Oslo, the capital of Norway")
    names, pieces, finishes = [], [], []
    for chunk in hermes.client().chat.completions.create(stream=True, **asked(text)):
        choice = chunk.choices[0]
        for call in choice.delta.tool_calls or []:
            names += [call.function.name] if call.function.name else []
            assert bool(call.id) == bool(call.function.name) == (call.type == "function") and call.index == 0
            pieces.append(call.function.arguments)
        finishes += [choice.finish_reason] if choice.finish_reason else []
    assert names == ["weather"] and finishes == ["tool_calls"]
    assert json.loads("".join(pieces)) == {"city": "Oslo, the capital of Norway"}


def test_the_answers_of_tools_reach_the_template(hermes: Server) -> None:
    client = hermes.client()
    body = asked(CALL)
    first = client.chat.completions.create(**body).choices[0].message
    assert first.tool_calls
    result = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": play("Rain.")}
    messages = [*body["messages"], first.model_dump(), result]
    second = client.chat.completions.create(**{**body, "messages": messages})
    assert second.choices[0].message.content == "Rain." and second.choices[0].finish_reason == "stop"
    without = client.chat.completions.create(**{**body, "messages": [*body["messages"], result]})
    assert second.usage and without.usage and second.usage.prompt_tokens > without.usage.prompt_tokens + 20


def test_tool_choice_none_shows_no_tools(hermes: Server) -> None:
    answers = [hermes.client().chat.completions.create(**asked(CALL, **more)) for more in
               ({"tool_choice": "none"}, {"tools": None}, {"tool_choice": "auto"})]  # fmt: skip
    assert [answer.choices[0].message.content for answer in answers] == [CALL, CALL, None]
    prompts = [answer.usage.prompt_tokens if answer.usage else 0 for answer in answers]
    assert prompts[0] == prompts[1] < prompts[2]


@pytest.mark.parametrize(
    "more",
    [
        {"tool_choice": {"type": "function", "function": {"name": "weather"}}},
        {"tool_choice": "required", "tools": [WEATHER]},
    ],
)
def test_a_named_tool_is_called_whatever_the_model_says(hermes: Server, more: dict[str, Any]) -> None:
    """Text of the model's own is left out, and so is a second call, which a named tool or one alone cannot need."""
    pytest.importorskip("llguidance")
    for text in (CALL, f"{CALL}{'.' * 40}"):
        body = asked(text, parallel_tool_calls=False, **more)
        whole, part = hermes.client().chat.completions.create(**body).choices[0], streamed(hermes, **body)
        assert calls(whole.message) == calls(part.message) != []
        name, arguments = calls(whole.message)[0]
        assert (name, arguments, whole.message.content) == ("weather", '{"city": "Oslo"}', None)
        assert whole.finish_reason == part.finish_reason == "tool_calls"


STRICT: Any = [
    {"type": "function", "function": {"name": name, "strict": True, "parameters": {
        "type": "object", "required": [*fields], "additionalProperties": False, "properties": fields}}}
    for name, fields in (("weather", {"city": {"enum": ["Oslo", "Rome"]}, "days": {"type": "integer", "minimum": 1,
                                                                                  "maximum": 9}}),
                         ("clock", {"zone": {"enum": ["utc", "local"]}}))
]  # fmt: skip


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}], ids=str)
@pytest.mark.parametrize("format", ["hermes", "thinking", "mistral"])
def test_strict_arguments_follow_their_schema_whatever_the_model_would_say(
    format: str, choice: Any, request: pytest.FixtureRequest
) -> None:
    """Of several tools one is called by a grammar of them all; each answer is held against an independent validator."""
    pytest.importorskip("llguidance")
    server: Server = request.getfixturevalue(format)
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in STRICT}
    for word in ("rain", "the time", "x", "a long question about nothing"):
        body: dict[str, Any] = {
            "model": "tiny", "messages": [{"role": "user", "content": word}], "tools": STRICT, "tool_choice": choice,
            "temperature": 0, "max_tokens": 300, "parallel_tool_calls": False,
        }  # fmt: skip
        whole, part = server.client().chat.completions.create(**body).choices[0], streamed(server, **body)
        ((name, arguments),) = calls(whole.message)
        assert calls(part.message) == [(name, arguments)]
        assert whole.finish_reason == part.finish_reason == "tool_calls"
        assert name == "weather" or choice == "required"
        jsonschema.validate(json.loads(arguments), schemas[name])


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("format", ["hermes", "thinking", "mistral"])
def test_strict_arguments_of_calls_that_need_not_be(format: str, stream: bool, request: pytest.FixtureRequest) -> None:
    """`tool_choice` auto: text is free, and where the model begins a call, its arguments follow the schema."""
    pytest.importorskip("llguidance")
    server: Server = request.getfixturevalue(format)
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in STRICT}
    before, after = ("[TOOL_CALLS] [", "]") if format == "mistral" else ("<tool_call>\n", "\n</tool_call>")

    def answer(text: str, **more: Any) -> Any:
        body = asked(text, tools=STRICT, max_tokens=400, **more)
        return streamed(server, **body) if stream else server.client().chat.completions.create(**body).choices[0]

    right = '{"name": "weather", "arguments": {"city": "Oslo", "days": 3}}'
    for text in ("It rains {in} [Oslo].\n", '{"city": "Oslo"}', "", "a < b"):
        choice = answer(text)
        assert (choice.message.content or "", choice.message.tool_calls, choice.finish_reason) == (text, None, "stop")
    choice = answer(f"Let me see. {before}{right}{after}")
    assert calls(choice.message) == [("weather", '{"city": "Oslo", "days": 3}')]
    assert choice.message.content == "Let me see." and choice.finish_reason == "tool_calls"
    for wrong in ('{"name": "weather", "arguments": {"town": 3}}', '{"name": "rain"}', "nonsense", right[:50]):
        choice = answer(f"So: {before}{wrong}{after}", parallel_tool_calls=False)
        ((name, arguments),) = calls(choice.message)
        jsonschema.validate(json.loads(arguments), schemas[name])
        assert choice.message.content == "So:" and choice.finish_reason == "tool_calls"


def test_reasoning_may_speak_of_calls(thinking: Server) -> None:
    pytest.importorskip("llguidance")
    text = "<think>Perhaps <tool_call>this</tool_call>?</think>" + CALL.replace('"Oslo"', '"Oslo", "days": 2')
    choice = thinking.client().chat.completions.create(**asked(text, tools=STRICT, max_tokens=400)).choices[0]
    assert choice.message.reasoning_content == "Perhaps <tool_call>this</tool_call>?"  # type: ignore[attr-defined]
    assert calls(choice.message) == [("weather", '{"city": "Oslo", "days": 2}')]


def test_a_grammar_of_the_whole_answer_and_a_forced_call_exclude_each_other(hermes: Server) -> None:
    with pytest.raises(openai.BadRequestError, match="leave one out") as caught:
        hermes.client().chat.completions.create(
            **asked("", tools=STRICT, tool_choice="required", extra_body={"guided_json": {"type": "object"}})
        )
    assert caught.value.body["param"] == "tool_choice"  # type: ignore[index]


def test_without_parallel_calls_the_answer_ends_with_the_first(hermes: Server) -> None:
    body = asked(f"{CALL}{TIME}{'.' * 100}", parallel_tool_calls=False)
    whole, part = hermes.client().chat.completions.create(**body).choices[0], streamed(hermes, **body)
    assert calls(whole.message) == calls(part.message) == [("weather", '{"city": "Oslo"}')]
    assert whole.finish_reason == part.finish_reason == "tool_calls"
    assert hermes.settled()["phasewise_kv_live_bytes"] == 0


def test_a_call_that_is_cut_off_has_length_as_its_reason(hermes: Server) -> None:
    choice = hermes.client().chat.completions.create(**asked(CALL, max_tokens=60)).choices[0]
    assert choice.finish_reason == "length" and calls(choice.message)[0][0] == "weather"


def test_several_choices_have_calls_of_their_own(hermes: Server) -> None:
    answer = hermes.client().chat.completions.create(**asked(CALL, n=3))
    assert [calls(choice.message) for choice in answer.choices] == [[("weather", '{"city": "Oslo"}')]] * 3
    assert len({choice.message.tool_calls[0].id for choice in answer.choices if choice.message.tool_calls}) == 3


def test_words_that_are_special_tokens_are_read(mistral: Server) -> None:
    text = 'Hm.[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Oslo"}}]'
    body = asked(text)
    for choice in (mistral.client().chat.completions.create(**body).choices[0], streamed(mistral, **body)):
        assert (choice.message.content, calls(choice.message)) == ("Hm.", [("weather", '{"city": "Oslo"}')])
    plain = mistral.client().chat.completions.create(**{**body, "tools": None}).choices[0].message.content
    assert plain == text.replace("[TOOL_CALLS]", ""), "without tools special tokens have no text"
    pytest.importorskip("llguidance")
    named = {"tool_choice": {"type": "function", "function": {"name": "clock"}}}
    own = '[TOOL_CALLS] [{"name": "clock", "arguments": {}}]'
    choice = mistral.client().chat.completions.create(**asked(own, **named)).choices[0]
    assert calls(choice.message) == [("clock", "{}")]


CODED = """So:
<tool_call>
<function=weather>
<parameter=city>
Oslo "N"
</parameter>
<parameter=days>
2
</parameter>
</function>
</tool_call>"""
TYPED: Any = {
    "type": "function",
    "function": {"name": "weather", "parameters": {
        "type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}},
}  # fmt: skip


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("coder", CODED),
        ("fenced", 'So:<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n'
         '{"city": "Oslo \\"N\\"", "days": 2}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>'),
    ],
)  # fmt: skip
def test_formats_of_coders(template: str, text: str) -> None:
    expected = {"city": 'Oslo "N"', "days": 2}
    with Server(model=checkpoint(template), faults={"plays": True}) as server:
        body = asked(text, tools=[TYPED], max_tokens=400)
        for choice in (server.client().chat.completions.create(**body).choices[0], streamed(server, **body)):
            ((name, arguments),) = calls(choice.message)
            assert (choice.message.content, name, json.loads(arguments)) == ("So:", "weather", expected)
            assert choice.finish_reason == "tool_calls"
        pytest.importorskip("llguidance")
        own = text.removeprefix("So:").lstrip()
        named = {"tool_choice": {"type": "function", "function": {"name": "weather"}}, "tools": [TYPED]}
        forced = server.client().chat.completions.create(**asked(own, **named, max_tokens=400)).choices[0]
        assert json.loads(calls(forced.message)[0][1]) == expected


def test_reasoning_is_no_content(thinking: Server) -> None:
    text = f"<think>\nOslo is in Norway.\n</think>\n\n{CALL}"
    opened = {"extra_body": {"chat_template_kwargs": {"open": "<think>"}}}
    for body in (asked(text), asked(text.partition("<think>")[2], **opened)):
        choice = thinking.client().chat.completions.create(**body).choices[0]
        assert (choice.message.content, calls(choice.message)) == (None, [("weather", '{"city": "Oslo"}')])
        assert choice.message.reasoning_content == "Oslo is in Norway."  # type: ignore[attr-defined]
        pieces = [
            getattr(chunk.choices[0].delta, "reasoning_content", None) or ""
            for chunk in thinking.client().chat.completions.create(stream=True, **body)
        ]
        assert "".join(pieces) == "Oslo is in Norway."
    named = {"tool_choice": {"type": "function", "function": {"name": "clock"}}}
    forced = asked(TIME, **named, **opened)
    assert calls(thinking.client().chat.completions.create(**forced).choices[0].message) == [("clock", "{}")]


def test_reasoning_without_tools_and_answers_without_reasoning(thinking: Server) -> None:
    for text, content, reasoning in (("<think>a</think>b", "b", "a"), (" b", " b", None), ("<think>a", "", "a")):
        choice = thinking.client().chat.completions.create(**asked(text, tools=None)).choices[0]
        assert choice.message.content == content and choice.finish_reason == "stop"
        assert getattr(choice.message, "reasoning_content", None) == reasoning


WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"tools": {}}, "tools", "list"),
    ({"tools": [{"type": "web_search"}]}, "tools", "other tools are not supported"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools", "name"),
    ({"tools": [CLOCK, CLOCK]}, "tools", "one name"),
    ({"tools": [{"type": "function", "function": {"name": "f", "strict": "yes"}}]}, "tools", "strict"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": 3}}]}, "tools", "schema"),
    ({"tool_choice": "always"}, "tool_choice", "none, auto, required"),
    ({"tool_choice": "required", "tools": []}, "tool_choice", "needs tools"),
    ({"tool_choice": {"type": "function", "function": {"name": "wether"}}}, "tool_choice", "weather, clock"),
    ({"parallel_tool_calls": "no"}, "parallel_tool_calls", "boolean"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages", "tool_call_id"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"id": "a"}]}]}, "messages", "tool call is"),
    ({"messages": [{"role": "assistant", "tool_calls": 3}]}, "messages", "must be a list"),
    ({"functions": [{"name": "f"}]}, "functions", "not supported"),
]


@pytest.mark.parametrize(("more", "param", "words"), WRONG)
def test_what_is_wrong_is_named(hermes: Server, more: dict[str, Any], param: str, words: str) -> None:
    answer = hermes.post("/v1/chat/completions", {**asked("x"), **more})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param and words in error["message"]


def test_templates_without_tools_say_so(server: Server) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        server.client().chat.completions.create(**asked("x"))
    assert refused.value.param == "tools" and "shows no tools" in refused.value.message
    messages = [{"role": "assistant", "tool_calls": None, "content": "a"}, {"role": "user", "content": "b"}]
    assert server.post("/v1/chat/completions", {"messages": messages, "max_tokens": 2, "tools": []}).status_code == 200
