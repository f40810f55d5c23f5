"""Answers that have to be a call, `strict` or not: of a model with random weights every complete one is a call."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phasewise.errors import UserError
from phasewise.serve.failures import ApiError
from phasewise.serve.tools.forced import grammar
from phasewise.serve.tools.formats import FORMATS
from phasewise.serve.tools.reader import OutputParser, ParserOptions
from phasewise.serve.tools.spelling import Spelling
from tests.seeds import draw
from tests.serve.playing import checkpoint, play
from tests.serve.running import Server
from tests.serve.tools.test_optional import allows, grammars, tokenizer

pytest.importorskip("llguidance")
SCHEMAS: dict[str, Any] = {
    "weather": {
        "type": "object", "required": ["city", "dry"], "additionalProperties": False, "properties": {
            "city": {"enum": ["Oslo", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9},
            "dry": {"type": "boolean"}, "note": {"type": "string", "maxLength": 8},
            "hours": {"type": "array", "items": {"enum": [1, 2]}, "maxItems": 2},
        },
    },
    "clock": {"type": "object", "properties": {}, "additionalProperties": False},
}  # fmt: skip
TOOLS: Any = [{"type": "function", "function": {"name": name, "parameters": own}} for name, own in SCHEMAS.items()]
NAMED: Any = {"type": "function", "function": {"name": "weather"}}
ENDING = '"}])</>'
TEMPLATES = ("hermes", "opened", "llama3", "mistral", "named", "pythonic", "coder", "fenced", "separated", "tool_code")


@pytest.fixture(scope="module", params=draw(__name__).sample(TEMPLATES, 3))
def any_format(request: pytest.FixtureRequest) -> Iterator[Server]:
    """A server whose model writes calls in one of the formats, and obeys messages that say what to answer."""
    with Server(model=checkpoint(request.param), faults={"plays": True}) as running:
        yield running


def asked(**more: Any) -> dict[str, Any]:
    """A request whose answer is as random as the weights."""
    said = {"model": "tiny", "messages": [{"role": "user", "content": "Is it raining?"}], "tools": TOOLS}
    return {**said, "max_tokens": 300, "temperature": 1.5, **more}


def calls(choice: Any) -> list[tuple[str, Any]]:
    """The calls of a complete answer, which has nothing else."""
    assert not choice.message.content and choice.finish_reason == "tool_calls"
    return [(call.function.name, json.loads(call.function.arguments)) for call in choice.message.tool_calls]


@pytest.mark.parametrize(("choice", "strict"), [("required", True), (NAMED, False)], ids=["required", "named"])
def test_every_complete_answer_is_a_call(any_format: Server, choice: Any, strict: bool) -> None:
    tools = [{**tool, "function": {**tool["function"], "strict": strict}} for tool in TOOLS]
    body = asked(tools=tools, tool_choice=choice, parallel_tool_calls=False)
    answer = any_format.client().chat.completions.create(**body, n=24, seed=5)
    found = [calls(each) for each in answer.choices if each.finish_reason != "length"]
    assert len(found) >= 20, "most of them are complete"
    for each in found:
        ((name, arguments),) = each
        assert choice == "required" or name == "weather"
        jsonschema.validate(arguments, SCHEMAS[name])


def test_streams_are_the_same(any_format: Server) -> None:
    for seed in range(4):
        body = asked(tool_choice="required", parallel_tool_calls=False, seed=seed)
        whole = any_format.client().chat.completions.create(**body).choices[0]
        with any_format.client().chat.completions.stream(**body) as stream:
            assert all(event.type for event in stream)
            part = stream.get_final_completion().choices[0]
        assert whole.finish_reason == part.finish_reason
        if whole.finish_reason != "length":
            assert calls(whole) == calls(part) and len(calls(whole)) == 1


def test_a_tool_without_a_schema_has_any_object(any_format: Server) -> None:
    """What ends strings and brackets is likelier than it would be, or texts would never end."""
    tools: Any = [{"type": "function", "function": {"name": "clock"}}]
    ids = {c: any_format.post("/tokenize", {"prompt": c, "add_special_tokens": False}).json()["tokens"] for c in ENDING}
    biased = {"2": 100} | {str(token): 12 for (token,) in ids.values()}
    body = asked(tools=tools, tool_choice="required", logit_bias=biased)
    answer = any_format.client().chat.completions.create(**body, n=24, seed=1)
    found = [calls(each) for each in answer.choices if each.finish_reason != "length"]
    assert found, "some are complete"
    for each in found:
        assert each and all(name == "clock" and isinstance(arguments, dict) for name, arguments in each)


def test_one_or_more_are_required_and_one_is_named() -> None:
    two = '{"name": "clock", "parameters": {}}; {"name": "clock", "parameters": {}}'
    with Server(model=checkpoint("llama3"), faults={"plays": True}) as server:
        for choice, parallel, expected in (
            ("required", True, 2), ("required", None, 2), ("required", False, 1),
            ({"type": "function", "function": {"name": "clock"}}, True, 1),
        ):  # fmt: skip
            body = asked(tool_choice=choice, messages=[{"role": "user", "content": play(two)}], temperature=0)
            more = {} if parallel is None else {"parallel_tool_calls": parallel}
            said = calls(server.client().chat.completions.create(**body, **more).choices[0])
            assert said == [("clock", {})] * expected


UNHELD: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}


def test_a_schema_that_cannot_be_held_is_any_object_unless_it_is_strict(hermes: Server) -> None:
    text = '<tool_call>\n{"name": "odd", "arguments": {"a": 3}}\n</tool_call>'
    odd: Any = {"type": "function", "function": {"name": "odd", "parameters": UNHELD}}
    body = asked(tools=[*TOOLS, odd], tool_choice="required", messages=[{"role": "user", "content": play(text)}])
    assert calls(hermes.client().chat.completions.create(**body).choices[0]) == [("odd", {"a": 3})]
    wrong = text.replace("odd", "weather")
    body["messages"] = [{"role": "user", "content": play(wrong)}]
    ((name, arguments),) = calls(hermes.client().chat.completions.create(**body).choices[0])
    assert name == "weather", "those of others are held all the same"
    jsonschema.validate(arguments, SCHEMAS[name])
    odd["function"]["strict"] = True
    with pytest.raises(openai.BadRequestError, match="tools: odd: .*uniqueItems") as refused:
        hermes.client().chat.completions.create(**body)
    assert refused.value.param == "tools"


def test_arguments_are_an_object_whatever_a_schema_says(hermes: Server) -> None:
    loose: Any = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"x": {"const": 1}}}}}
    answer = hermes.client().chat.completions.create(**asked(tools=[loose], tool_choice="required", n=8, seed=3))
    for each in answer.choices:
        if each.finish_reason != "length":
            assert all(isinstance(arguments, dict) for _, arguments in calls(each))
    never: Any = {"type": "function", "function": {"name": "f", "strict": True, "parameters": {"type": "string"}}}
    with pytest.raises(openai.BadRequestError, match="arguments are an object"):
        hermes.client().chat.completions.create(**asked(tools=[never], tool_choice="required"))


def test_anthropics_and_responses_ways_to_say_it(hermes: Server) -> None:
    own = [{"name": name, "input_schema": schema} for name, schema in SCHEMAS.items()]
    import anthropic  # which takes long

    client = anthropic.Anthropic(base_url=hermes.url, api_key="none", max_retries=0)
    choices: list[Any] = [{"type": "any"}, {"type": "tool", "name": "weather"}]
    for choice in choices:
        choice = {**choice, "disable_parallel_tool_use": True}
        message = client.messages.create(
            model="tiny", max_tokens=400, messages=[{"role": "user", "content": "x"}], tools=own, tool_choice=choice,
            extra_body={"temperature": 0},
        )  # type: ignore[call-overload]  # fmt: skip
        assert message.stop_reason == "tool_use"
        (block,) = message.content
        jsonschema.validate(block.input, SCHEMAS[block.name])
    flat: Any = [{"type": "function", **tool["function"]} for tool in TOOLS]
    named: Any = {"type": "function", "name": "weather"}
    for way in ("required", named):
        done = hermes.client().responses.create(
            model="tiny", input="x", tools=flat, tool_choice=way, parallel_tool_calls=False, temperature=0,
            max_output_tokens=400,
        )  # fmt: skip
        (item,) = done.output
        assert item.type == "function_call" and done.status == "completed"
        jsonschema.validate(json.loads(item.arguments), SCHEMAS[item.name])


def test_without_grammars_the_answer_begins_with_the_opening_of_its_call() -> None:
    with Server(model=checkpoint("hermes"), faults={"plays": True}, verbs={"sample": "standard"}) as server:
        rest = play('"city": "Oslo"}}\n</tool_call>')
        body = asked(tool_choice=NAMED, temperature=0, messages=[{"role": "user", "content": rest}])
        assert calls(server.client().chat.completions.create(**body).choices[0]) == [("weather", {"city": "Oslo"})]
        with pytest.raises(openai.BadRequestError, match="no method of this engine takes"):
            server.client().chat.completions.create(**{**body, "tool_choice": "required"})


ALLOWED: list[tuple[str, dict[str, Any], str, str | None]] = [  # format, a schema, arguments as written; as JSON, if so
    ("qwen3_coder", {"type": "string"}, "a < b </p\n\n\u00e9", '"a < b </p\\n\\n\u00e9"'),
    ("qwen3_coder", {"type": "string"}, "", '""'),
    ("qwen3_coder", {"type": "string", "minLength": 2, "maxLength": 3}, "a\nb", '"a\\nb"'),
    ("qwen3_coder", {"type": "string", "minLength": 2, "maxLength": 3}, "abcd", None),
    ("qwen3_coder", {"type": "string", "minLength": 2}, "a", None),
    ("qwen3_coder", {"enum": ["a", "b c"]}, "b c", '"b c"'),
    ("qwen3_coder", {"enum": ["a", "b c"]}, "b", None),
    ("qwen3_coder", {"const": "a"}, "a", '"a"'),
    ("qwen3_coder", {"enum": ["a", 1]}, '"a"', '"a"'),
    ("qwen3_coder", {"type": "integer"}, "12", "12"),
    ("qwen3_coder", {"type": "integer"}, "twelve", None),
    ("qwen3_coder", {"anyOf": [{"type": "string"}, {"type": "null"}]}, "null", "null"),
    ("qwen3_coder", {"$ref": "#/$defs/two"}, "[1, 2]", "[1, 2]"),
    ("qwen3_coder", {"$ref": "#/$defs/two"}, "[1]", None),
    ("qwen3_coder", True, "anything", '"anything"'),
    ("pythonic", {"type": "string"}, '"a\\n"', '"a\\n"'),
    ("pythonic", {"type": "boolean"}, "True", "true"),
    ("pythonic", {"type": "boolean"}, "true", None),
    ("pythonic", {"type": "null"}, "None", "null"),
    ("pythonic", {"$ref": "#/$defs/two"}, "[1, 2]", "[1, 2]"),
    ("gemma", {"type": "integer", "maximum": 9}, "7", "7"),
    ("gemma", {"type": "integer", "maximum": 9}, "12", None),
]
WRITTEN = {
    "qwen3_coder": "<tool_call>\n<function=f>\n<parameter=x>\n{}\n</parameter>\n</function>\n</tool_call>",
    "pythonic": "[f(x={})]",
    "gemma": "```tool_code\nf(x={})\n```",
}


def function(schema: Any, **more: Any) -> dict[str, Any]:
    two = {"type": "array", "items": {"type": "integer"}, "minItems": 2}
    parameters = {"type": "object", "properties": {"x": schema}, "required": ["x"], "$defs": {"two": two}, **more}
    return {"name": "f", "strict": True, "parameters": parameters}


@pytest.mark.parametrize(("name", "schema", "value", "expected"), ALLOWED)
def test_values_that_are_not_json_as_a_whole(name: str, schema: Any, value: str, expected: str | None) -> None:
    """What the grammar allows is what the reader reads."""
    tool, format, text = {"function": function(schema)}, FORMATS[name], WRITTEN[name].format(value)
    ask = grammar([tool], format, format.opening, Spelling({}), single=True)
    assert allows(ask, tokenizer().encode(text, add_special=False)) == (expected is not None)
    reader = OutputParser(ParserOptions(format, frozenset({"f"}), schemas={"f": tool["function"]["parameters"]}))
    deltas = reader.push(text) + reader.finish()
    said = "".join(delta.text for delta in deltas if delta.kind == "arguments")
    assert expected is None or said == f'{{"x": {expected}}}'


@pytest.mark.parametrize(
    ("name", "schema", "more", "word"),
    [
        ("qwen3_coder", {"type": "string", "pattern": "a+"}, {}, "pattern"),
        ("qwen3_coder", {"type": "string", "format": "date"}, {}, "format"),
        ("qwen3_coder", {"enum": ["</parameter>"]}, {}, "enum of x"),
        ("qwen3_coder", False, {}, "false for x"),
        ("qwen3_coder", {"type": "string", "enum": 5}, {}, "enum of x"),
        ("qwen3_coder", {"type": "string", "minLength": "1}/"}, {}, "minLength"),
        ("qwen3_coder", {"type": "string", "maxLength": -1}, {}, "maxLength"),
        ("qwen3_coder", {}, {"minProperties": 1}, "minProperties"),
        ("qwen3_coder", {}, {"anyOf": [{}]}, "anyOf"),
        ("qwen3_coder", {}, {"properties": {"a>": {}}}, "properties: 'a>'"),
        ("qwen3_coder", {}, {"type": "array"}, "type 'array'"),
        ("pythonic", {}, {"properties": {"a-b": {}}}, "properties: 'a-b'"),
        ("gemma", {}, {"patternProperties": {}}, "patternProperties"),
    ],
)
def test_what_a_format_without_json_cannot_hold_is_named(name: str, schema: Any, more: Any, word: str) -> None:
    with pytest.raises(ApiError, match=word) as refused:
        grammar([{"function": function(schema, **more)}], FORMATS[name], FORMATS[name].opening, Spelling({}), True)
    assert refused.value.status == 400 and "leave strict out" in str(refused.value)


@pytest.mark.parametrize("required", [[], ["b"], ["a", "c"], ["a", "b", "c"]])
def test_arguments_of_python_are_separated_by_commas_whichever_are_there(required: list[str]) -> None:
    parameters = {"properties": {key: {"type": "integer"} for key in "abc"}, "required": required}
    ask = grammar([{"function": {"name": "f", "strict": True, "parameters": parameters}}], FORMATS["pythonic"],
                  "[{name}(", Spelling({}), True)  # fmt: skip
    for which in ("", "a", "b", "c", "ab", "ac", "bc", "abc", "ba"):
        text = f"[f({', '.join(f'{key}=1' for key in which)})]"
        fine = set(required) <= set(which) and list(which) == sorted(which)
        assert allows(ask, tokenizer().encode(text, add_special=False)) == fine, text


ODD = st.recursive(
    st.none() | st.booleans() | st.integers(-1, 1 << 40)
    | st.sampled_from(["", "object", "string", "a", "#/$defs/two"]),
    lambda inner: st.lists(inner, max_size=2)
    | st.dictionaries(
        st.sampled_from(["type", "properties", "required", "enum", "const", "minLength", "maxLength", "x", "$ref",
                         "items", "anyOf", "$defs", "additionalProperties", "x-guidance", "pattern"]),
        inner, max_size=4),
    max_leaves=8,
)  # fmt: skip


@pytest.mark.parametrize("name", sorted(FORMATS))
@given(schema=ODD, more=st.dictionaries(st.sampled_from(["properties", "required", "type", "$defs", "anyOf"]), ODD))
@settings(max_examples=20)
def test_whatever_a_schema_is_there_is_a_grammar_or_a_reason(name: str, schema: Any, more: dict[str, Any]) -> None:
    tool = {"function": function(schema, **more)}
    try:
        ask = grammar([tool], FORMATS[name], FORMATS[name].opening, Spelling({}), single=False)
        grammars().get(ask)
    except (ApiError, UserError) as error:
        assert str(error)
