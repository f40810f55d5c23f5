"""Arguments that are written without quotes around texts: what a tool's schema makes of them."""

from __future__ import annotations

import json
import time
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasewise.serve.tools.final import calls as held
from phasewise.serve.tools.formats import FORMATS
from phasewise.serve.tools.reader import OutputParser, ParserOptions
from phasewise.serve.tools.spelling import Spelling
from phasewise.serve.tools.typed import argument, plain
from tests.serve.tools.test_optional import allows, tokenizer

DEFS = {"S": {"type": "string"}, "N": {"anyOf": [{"$ref": "#/$defs/I"}, {"type": "null"}]}, "I": {"type": "integer"},
        "Loop": {"$ref": "#/$defs/Loop"}, "a/b": {"enum": ["7", "x"]}}  # fmt: skip
TEXT = {
    "plain": {"type": "string"},
    "no schema": {},
    "optional": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None},
    "type list": {"type": ["string", "null"]},
    "nullable": {"type": "string", "nullable": True},
    "reference": {"$ref": "#/$defs/S"},
    "reference, described": {"$ref": "#/$defs/S", "description": "a name"},
    "optional reference": {"oneOf": [{"$ref": "#/$defs/S"}, {"type": "null"}]},
    "allOf": {"allOf": [{"type": "string"}, {"minLength": 1}]},
    "allOf of unions": {"allOf": [{"type": ["string", "integer"]}, {"type": ["string", "null"]}]},
    "enum": {"enum": ["12345", "true", '{"a": 1}']},
    "enum or null": {"anyOf": [{"enum": ["12345", "true", '{"a": 1}']}, {"type": "null"}]},
    "enum with null": {"enum": ["12345", "true", '{"a": 1}', None]},
    "const": {"const": "12345"},
}
OTHER: list[tuple[Any, str, str]] = [
    ({"type": "integer"}, "12345", "12345"),
    ({"type": "integer"}, "9007199254740993", "9007199254740993"),
    ({"type": "integer"}, "123456789012345678901234567890", "123456789012345678901234567890"),
    ({"$ref": "#/$defs/N"}, "12345", "12345"),
    ({"$ref": "#/$defs/N"}, "None", "null"),
    ({"$ref": "#/$defs/a~1b"}, "7", '"7"'),
    ({"type": ["boolean", "null"]}, "True", "true"),
    ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, "12345", "12345"),
    ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, "true", '"true"'),
    ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, "1.5", '"1.5"'),
    ({"type": ["string", "object"]}, '{"a": 1}', '{"a": 1}'),
    ({"type": ["string", "object"]}, "[1]", '"[1]"'),
    ({"enum": ["5", 6]}, "5", '"5"'),
    ({"enum": ["5", 6]}, "6", "6"),
    ({"enum": [1, True]}, "true", "true"),
    ({"enum": ["null", None]}, "null", '"null"'),
    ({"type": ["string", "null"]}, "null", "null"),
    ({"type": "string"}, "null", '"null"'),
    ({"type": "number"}, "1e3", "1e3"),
    ({"type": "array", "items": {"type": "string"}}, '["a"]', '["a"]'),
    ({"type": "object"}, "not JSON", '"not JSON"'),
    ({"$ref": "#/$defs/Loop"}, "5", "5"),
    ({"$ref": "elsewhere.json"}, "5", "5"),
]


def read(schema: Any, said: str, cut: int = 0) -> dict[str, Any]:
    """What a reader of qwen3_coder's calls tells of one argument."""
    parameters = {"type": "object", "properties": {"v": schema}, "$defs": DEFS}
    text = f"<tool_call>\n<function=f>\n<parameter=v>\n{said}\n</parameter>\n</function>\n</tool_call>"
    reader = OutputParser(ParserOptions(FORMATS["qwen3_coder"], frozenset({"f"}), schemas={"f": parameters}))
    deltas = [*reader.push(text[:cut]), *reader.push(text[cut:]), *reader.finish()]
    found: dict[str, Any] = json.loads("".join(delta.text for delta in deltas if delta.kind == "arguments"))
    return found


@pytest.mark.parametrize("name", TEXT)
def test_texts_stay_texts(name: str) -> None:
    for said in ("12345", "true", '{"a": 1}'):
        assert read(TEXT[name], said) == {"v": said}
    if "enum" not in name and name != "const":
        for said in ("", "nul", "nulls", "null\n", "</param", "<", "\n\nx", '"quoted"'):
            assert read(TEXT[name], said) == {"v": said}
    assert read(TEXT[name], "null") == {"v": None if "null" in argument_kinds(TEXT[name]) else "null"}


def argument_kinds(schema: Any) -> frozenset[str]:
    return frozenset() if schema == {} else argument({"properties": {"v": schema}, "$defs": DEFS}, "v").kinds


@pytest.mark.parametrize(("schema", "said", "told"), OTHER)
def test_other_types(schema: Any, said: str, told: str) -> None:
    kind = argument({"properties": {"v": schema}, "$defs": DEFS}, "v")
    assert kind.told(said) == told
    if kind.is_text_or_null or not kind.is_text:
        assert json.dumps(read(schema, said)["v"]) == json.dumps(json.loads(told))


def test_parameters_may_be_elsewhere() -> None:
    inner = {"type": "object", "properties": {"v": {"type": "string"}}, "additionalProperties": {"type": "integer"}}
    for parameters in ({"$ref": "#/$defs/A", "$defs": {"A": inner}}, {"allOf": [inner]}):
        assert argument(parameters, "v").told("5") == '"5"'
    assert argument(inner, "w").told("5") == "5"
    assert argument({}, "w").told("5") == argument(None, "w").told("5") == '"5"'


@pytest.mark.parametrize("word", ["anyOf", "allOf", "oneOf"])
def test_schemas_that_refer_to_themselves_cost_no_more_than_others(word: str) -> None:
    """Twice at each level, without an end; what is not looked at forbids nothing."""
    twice = {word: [{"$ref": "#/$defs/X"}, {"$ref": "#/$defs/X"}]}
    chain = {f"C{i}": {word: [{"$ref": f"#/$defs/C{i + 1}"}] * 2} for i in range(40)}
    for schema in (twice, {"type": "string", **twice}, {"$ref": "#/$defs/C0"}):
        root = {"properties": {"v": schema}, "$defs": {"X": twice, **chain}}
        began = time.process_time()
        assert argument(root, "v").told("5") == ('"5"' if "type" in schema else "5")
        assert plain(schema, root).keys() >= {"type"} & schema.keys()
        assert time.process_time() - began < 5


TYPES = st.sampled_from(["string", "null", "integer", "number", "boolean", "object", "array"])
VALUES = st.sampled_from(["5", 5, 5.5, True, None, "null", {"a": 1}, [1], "true", '{"a": 1}'])
SCHEMAS: st.SearchStrategy[Any] = st.recursive(
    st.one_of(
        TYPES.map(lambda name: {"type": name}),
        st.lists(TYPES, min_size=1, unique=True).map(lambda names: {"type": names}),
        st.lists(VALUES, min_size=1, max_size=3).map(lambda values: {"enum": values}),
        VALUES.map(lambda value: {"const": value}),
        st.sampled_from(["S", "I", "N"]).map(lambda name: {"$ref": f"#/$defs/{name}"}),
    ),
    lambda inner: st.builds(
        lambda word, each: {word: each}, st.sampled_from(["anyOf", "allOf"]), st.lists(inner, min_size=1, max_size=3)
    ),
    max_leaves=5,
)


@given(SCHEMAS, VALUES, st.integers(0, 60))
def test_types_and_values_are_judged_as_jsonschema_judges_them(schema: Any, value: Any, cut: int) -> None:
    """And what is told is valid wherever either way to read the text is."""
    whole = {"$defs": DEFS, **schema}
    judge = jsonschema.Draft202012Validator(whole)
    kind = argument({"properties": {"v": schema}, "$defs": DEFS}, "v")
    assert kind.allows(value) == judge.is_valid(value)
    said = value if isinstance(value, str) else json.dumps(value)
    told = read(schema, said, cut)["v"]
    if judge.is_valid(said) or judge.is_valid(json.loads(said)):
        assert judge.is_valid(told)


STRICT: list[tuple[Any, list[str], list[str]]] = [
    (TEXT["optional"], ["12345", "null", "a b"], []),
    (TEXT["enum or null"], ["12345", "null"], ["5", '"12345"']),
    (TEXT["enum with null"], ["true", "null"], ["false"]),
    (TEXT["optional reference"], ["x"], []),
    ({"allOf": [{"type": "string"}, {"maxLength": 3}]}, ["abc"], ["abcd"]),
    ({"type": ["string", "null"], "maxLength": 2}, ["ab"], ["abc"]),
    ({"$ref": "#/$defs/N"}, ["5", "null"], ["x", "None"]),
    ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, ['"x"', "5"], ["x"]),
]


@pytest.mark.parametrize(("schema", "good", "bad"), STRICT)
def test_strict_arguments_are_written_as_they_are_read(schema: Any, good: list[str], bad: list[str]) -> None:
    pytest.importorskip("llguidance")
    parameters = {"type": "object", "properties": {"v": schema}, "required": ["v"], "$defs": DEFS}
    parameters["additionalProperties"] = False
    format = FORMATS["qwen3_coder"]
    tool = {"function": {"name": "f", "strict": True, "parameters": parameters}}
    ask = held([tool], format, format.opening, Spelling({}), single=True)

    def allowed(said: str) -> bool:
        text = f"<tool_call>\n<function=f>\n<parameter=v>\n{said}\n</parameter>\n</function>\n</tool_call>"
        return allows(ask, tokenizer().encode(text, add_special=False))

    assert all(map(allowed, good)) and not any(map(allowed, bad))
    for said in good:
        jsonschema.validate(read(schema, said), parameters, jsonschema.Draft202012Validator)
