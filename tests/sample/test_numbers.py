"""Numbers of a schema are exact or refused by name; nothing that a schema says takes the server down."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from phasewise.errors import Unanswerable, UserError
from phasewise.methods.sample._grammars import Grammars, compiled
from phasewise.methods.sample._words import Words
from phasewise.methods.sample.grammar import GrammarState
from phasewise.request.params import Params
from phasewise.request.request import Request
from tests.sample.vocabularies import END, byte_level

pytest.importorskip("llguidance")
LETTERS = bytes(range(32, 127))
WORDS = Words(byte_level([bytes([letter]) for letter in LETTERS]), 3 + len(LETTERS), [END])
IDS = {WORDS.bytes[i]: i for i in range(3, WORDS.vocab)}
GRAMMARS = Grammars(WORDS)
SAFE = 2**53 - 1


def follows(schema: Any, value: Any) -> bool:
    matcher = GRAMMARS.get({"json_schema": schema}).start()
    text = json.dumps(value, separators=(",", ":")).encode()
    return bool(matcher.try_consume_tokens([IDS[bytes([letter])] for letter in text]) == len(text)) and bool(
        matcher.is_accepting()
    )


@pytest.mark.parametrize("number", [0, 1, -1, 2**31, -(2**40) - 1, SAFE, -SAFE, 2**53 - 2])
def test_exact_to_the_last_digit(number: int) -> None:
    for schema in (
        {"const": number},
        {"enum": ["x", number]},
        {"type": "integer", "minimum": number, "maximum": number},
    ):
        assert follows(schema, number) and not follows(schema, number + 1) and not follows(schema, number - 1)
    assert follows({"const": {"a": [number]}}, {"a": [number]}) and not follows({"const": [number]}, [number + 1])


@pytest.mark.parametrize(
    "number", [2**53 + 1, 2**60, 2**63 - 1, -(2**63), -(2**63) + 1, 2**64, 10**30 + 7, -1e19, 1e300]
)
@pytest.mark.parametrize(
    ("word", "schema"),
    [
        ("const", lambda n: {"const": n}),
        ("const", lambda n: {"properties": {"minimum": {"const": {"x": [n]}}}}),
        ("enum", lambda n: {"type": "array", "items": {"enum": [1, n]}}),
        *((word, lambda n, word=word: {"type": "integer", word: n}) for word in ("minimum", "exclusiveMaximum")),
        ("maximum", lambda n: {"anyOf": [{"type": "number", "maximum": n}]}),
    ],
)  # fmt: skip
def test_others_are_refused_by_name(word: str, schema: Any, number: float) -> None:
    with pytest.raises(UserError, match=rf"json_schema: {word}=.* is beyond 2\^53"):
        GRAMMARS.get({"json_schema": schema(number)})
    with pytest.raises(UserError, match=rf"{word}=.* is beyond 2\^53"):
        GRAMMARS.get({"grammar": f'start: "a" %json {json.dumps(schema(number))}'})
    with pytest.raises(UserError, match=rf"{word}=.* is beyond 2\^53"):
        around = {"start": "start: @answer | @other", "other": f"start: %json {json.dumps(schema(number))}"}
        GRAMMARS.get({"choice": ["a"], "around": around})


def test_numbers_that_constrain_nothing_may_be_any() -> None:
    schema = {"type": "integer", "default": 2**70, "title": "minimum"}
    assert follows(schema, 2**70)
    assert follows({"properties": {"maximum": {"type": "integer"}}, "type": "object"}, {"maximum": 2**70})


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_what_is_no_number_of_json_is_refused(value: float) -> None:
    for schema in ({"const": value}, {"type": "number", "minimum": value}, {"default": value}):
        with pytest.raises(UserError, match="is no number of JSON"):
            GRAMMARS.get({"json_schema": schema})


@pytest.mark.parametrize(
    "schema",
    [{"type": "integer", "multipleOf": 1_000_003}, {"type": "number", "multipleOf": 123456.789},
     {"type": "integer", "multipleOf": 10**18}, {"allOf": [{"multipleOf": 997}, {"multipleOf": 1009}]}],
)  # fmt: skip
def test_multiples_that_take_an_automaton_of_millions_are_refused(schema: Any) -> None:
    with pytest.raises(UserError, match=r"multipleOf=.* is more than 100,000"):
        GRAMMARS.get({"json_schema": schema})


def test_common_multiples_are_honoured() -> None:
    assert follows({"type": "integer", "multipleOf": 100}, 1200) and not follows(
        {"type": "integer", "multipleOf": 100}, 150
    )
    assert follows({"type": "number", "multipleOf": 0.01}, 1.25)


def test_a_failure_of_the_compiler_is_the_requests_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rust's panics are no Exception; what they say of its code is nobody's business."""
    panic = type("PanicException", (BaseException,), {})

    def fails(*_: Any, **__: Any) -> Any:
        raise panic("index out of bounds at src/lexer.rs:1")

    monkeypatch.setattr("llguidance.LLMatcher", fails)
    with pytest.raises(UserError, match="^regex cannot be honoured: llguidance has failed on it$"):
        compiled({"regex": "a"}, WORDS.tokenizer())


@pytest.mark.parametrize("ask", [{"json_schema": {"const": "\ud800"}}, {"choice": ["\ud800"]}, {"regex": "\ud800"}])
def test_text_that_is_no_unicode_is_refused(ask: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="cannot be honoured|is none"):
        GRAMMARS.get(ask)


@pytest.mark.parametrize("value", [None, [], {}, "x", 5, True, -1, 0, 0.5])
@pytest.mark.parametrize(
    "word",
    ["type", "properties", "required", "items", "enum", "const", "anyOf", "allOf", "oneOf", "$ref", "$defs", "pattern",
     "format", "minLength", "maxItems", "minimum", "multipleOf", "additionalProperties", "prefixItems", "x-guidance"],
)  # fmt: skip
def test_keywords_of_wrong_types_are_honoured_or_refused(word: str, value: Any) -> None:
    for schema in ({word: value}, {"type": "object", "properties": {"a": {word: value}}, "required": ["a"]}):
        try:
            assert GRAMMARS.get({"json_schema": schema}).start().compute_bitmask()
        except UserError as error:
            assert str(error).startswith("json_schema") and "panic" not in str(error)


def test_a_grammar_that_becomes_too_complex_is_the_requests_own_fault() -> None:
    """What it says of that has none of llguidance's marks."""
    line = GrammarState(GRAMMARS.get({"grammar": 'root ::= "a" root | root "b"'}), WORDS, 0)
    request = Request([], Params())
    with pytest.raises(Unanswerable, match="^the grammar has become too complex: .*Too many items[^<]*$"):
        for _ in range(4):
            line.sure(request.params)
            line.mask((), ())
            request.tokens.append(IDS[b"a"])
            line.roll(request)
