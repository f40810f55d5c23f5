"""A tiny model that can be asked for structured text, schemas to ask for, and an independent judge of what comes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from typing import Any

import jsonschema

from phasewise.model.model import Model
from phasewise.model.tokenizer import Tokenizer
from phasewise.request.params import Params
from phasewise.request.request import Request
from phasewise.verbs.place import Placed
from tests import tiny
from tests.serve.tiny_chat import chat_checkpoint

FLAT = {
    "type": "object",
    "properties": {
        "name": {"enum": ["the quick", "brown fox", "dog"]},
        "legs": {"type": "integer", "minimum": 0, "maximum": 99},
        "tame": {"type": "boolean"},
    },
    "required": ["name", "legs", "tame"],
    "additionalProperties": False,
}
NESTED = {
    "$defs": {"node": {
        "type": "object", "properties": {
            "word": {"type": "string", "pattern": "^[a-d]{1,3}$"},
            "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
        "required": ["word", "next"], "additionalProperties": False}},
    "$ref": "#/$defs/node",
}  # fmt: skip
ARRAY = {"type": "array", "items": {"type": "number", "minimum": -1, "maximum": 1}, "minItems": 1, "maxItems": 3}
SCHEMAS = {"flat": FLAT, "nested": NESTED, "array": ARRAY}


@cache
def model() -> Model:
    return Model.load(chat_checkpoint())


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.load(chat_checkpoint())


def engine(verbs: dict[str, str] | None = None, **limits: Any) -> Placed:
    return tiny.engine(verbs, of=model(), **limits)


def asking(n: int = 200, ask: dict[str, Any] | None = None, **more: Any) -> Params:
    return Params(max_tokens=n, ask=ask or {"json_schema": FLAT}, **more)


def prompts(*lengths: int) -> list[list[int]]:
    return tiny.prompts(*lengths, vocab=300)


def text(request: Request) -> str:
    return tokenizer().decode(request.out)


def valid(requests: Sequence[Request], schema: dict[str, Any]) -> int:
    """How many have come to their end; each of these must be valid, and no other may say that it has."""
    done = 0
    for request in requests:
        assert request.left is not None and request.left.how == "finished", request.left
        if request.left.reason == "stop":
            jsonschema.validate(json.loads(text(request)), schema, jsonschema.Draft202012Validator)
            assert request.out[-1] in model().config.eos
            done += 1
        else:
            assert request.n_out == request.params.max_tokens
    return done
