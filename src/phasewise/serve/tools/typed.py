"""Reads from a tool's schema what an argument is, where a format writes arguments without quotes around texts."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

NUMBERS = frozenset({"integer", "number"})
ALL = frozenset({"string", "null", "boolean", "object", "array"}) | NUMBERS
WORDS = {"true": "true", "false": "false", "none": "null", "null": "null"}
DEEP = 32  # references and combinations within one another
MOST = 4096  # schemas that are looked at for one question: of what lies beyond, nothing is known


@dataclass(frozen=True)
class ArgumentType:
    """One argument: its `schema`, and the `root` in which references are looked up. Keywords that say nothing of types
    or values, such as bounds, are not looked at."""

    schema: Any
    root: Any

    @cached_property
    def kinds(self) -> frozenset[str]:
        """The types of JSON that it may have."""
        return _kinds(self.schema, _Root(self.root), 0)

    @property
    def is_text(self) -> bool:
        """True if it is a text and nothing else; one without a schema is."""
        return not isinstance(self.schema, Mapping) or not self.schema or self.kinds == {"string"}

    @property
    def is_text_or_null(self) -> bool:
        return self.kinds == {"string", "null"}

    def told(self, said: str) -> str:
        """A value as JSON, from how it is written: JSON where the schema allows what that is, else a text where it
        allows one, else JSON if it can be read as such. A text, or null, is null for that word alone."""
        text = json.dumps(said, ensure_ascii=False)
        if self.is_text:
            return text
        if self.is_text_or_null:
            return "null" if said == "null" and not self._enumerates("null") else text
        try:
            value = json.loads(said, parse_constant=_refuse)
        except (ValueError, RecursionError):
            return text if self.allows(said) else WORDS.get(said.strip().lower()) or text
        return said.strip() if self.allows(value) or not self.allows(said) else text

    def allows(self, value: Any) -> bool:
        """True if types and enumerated values let it be this one."""
        return _allows(self.schema, value, _Root(self.root), 0)

    def _enumerates(self, text: str) -> bool:
        """True if a text is among the few that there may be."""
        return self.allows(text) and not self.allows(text + "\0")


def argument(parameters: Any, key: str) -> ArgumentType:
    """The type of one of a function's parameters, by their schema; one that this does not name has no schema."""
    for schema in _parts(parameters, _Root(parameters), 0):
        properties = schema.get("properties")
        if isinstance(properties, Mapping) and key in properties:
            return ArgumentType(properties[key], parameters)
    others = parameters.get("additionalProperties") if isinstance(parameters, Mapping) else None
    return ArgumentType(others if isinstance(others, Mapping) else {}, parameters)


class _Root:
    """The schema in which references are looked up, and how many schemas may still be looked at."""

    def __init__(self, schema: Any) -> None:
        self.schema, self.left = schema, MOST


def plain(schema: Mapping[str, Any], root: Any) -> dict[str, Any]:
    """The schema of a text, or of a text or null, without references, `allOf` and the alternative null, as far as they
    can be left out; what cannot stays."""
    return _plain(schema, _Root(root), 0)


def _join_single(own: dict[str, Any], root: _Root, depth: int) -> None:
    """Put the only schema of an anyOf or oneOf, but for null, in its place."""
    for word in ("anyOf", "oneOf"):
        texts = [each for each in own.get(word) or () if _kinds(each, root, depth) != {"null"}]
        if len(texts) == 1 and isinstance(texts[0], Mapping):
            del own[word]
            own |= _plain(texts[0], root, depth + 1)


def _plain(schema: Mapping[str, Any], root: _Root, depth: int) -> dict[str, Any]:
    if depth > DEEP:
        return dict(schema)
    found: dict[str, Any] = {}
    for part in _parts(schema, root, depth):
        own = {key: value for key, value in part.items() if key not in ("$ref", "allOf", "nullable")}
        _join_single(own, root, depth)
        if any(found.get(key, value) != value for key, value in own.items() if key not in ("title", "description")):
            return dict(schema)  # two parts say different things of one keyword
        found |= own
    if isinstance(found.get("type"), list):
        found["type"] = "string"
    if isinstance(found.get("enum"), list):
        found["enum"] = [each for each in found["enum"] if each is not None]
    return found


def _parts(schema: Any, root: _Root, depth: int) -> Iterator[Mapping[str, Any]]:
    """A schema and those that must hold besides it: what it refers to, and what `allOf` has."""
    root.left -= 1
    if not isinstance(schema, Mapping) or depth > DEEP or root.left < 0:
        return
    yield schema
    if "$ref" in schema:
        yield from _parts(_target(schema["$ref"], root.schema), root, depth + 1)
    every = schema.get("allOf")
    for each in every if isinstance(every, list) else ():
        yield from _parts(each, root, depth + 1)


def _target(ref: Any, root: Any) -> Any:
    """Returns what a reference within the schema stands for; nothing is known of others."""
    if not isinstance(ref, str) or not ref.startswith("#"):
        return True
    found = root
    for name in ref[1:].split("/")[1:]:
        key = name.replace("~1", "/").replace("~0", "~")
        found = found.get(key) if isinstance(found, Mapping) else None
    return True if found is None else found


def _kinds(schema: Any, root: _Root, depth: int) -> frozenset[str]:
    if schema is False:
        return frozenset()
    found = ALL
    for part in _parts(schema, root, depth):
        own = ALL & _of_type(part)
        if isinstance(part.get("enum"), list):
            own &= frozenset().union(*(_kinds_of(value) for value in part["enum"]))
        if "const" in part:
            own &= _kinds_of(part["const"])
        for word in ("anyOf", "oneOf"):
            if isinstance(part.get(word), list) and depth < DEEP:
                own &= frozenset().union(*(_kinds(each, root, depth + 1) for each in part[word]))
        found &= own | {"null"} if part.get("nullable") is True else own
    return found


def _of_type(schema: Mapping[str, Any]) -> frozenset[str]:
    named = schema.get("type", [*ALL])
    names = [each for each in (named if isinstance(named, list) else [named]) if isinstance(each, str)]
    return frozenset(names) | (NUMBERS if "number" in names else frozenset())


def _kinds_of(value: Any) -> frozenset[str]:
    """The types that a value of JSON has."""
    match value:
        case None:
            return frozenset({"null"})
        case bool():
            return frozenset({"boolean"})
        case int():
            return NUMBERS
        case float():
            return NUMBERS if value.is_integer() else frozenset({"number"})
        case str():
            return frozenset({"string"})
    return frozenset({"object" if isinstance(value, Mapping) else "array"})


def _lists(part: Mapping[str, Any], value: Any) -> bool:
    """True unless `enum` or `const` of a part of a schema leave the value out. True is not 1 here, nor 1.0."""
    if "const" not in part and not isinstance(part.get("enum"), list):
        return True
    values = part["enum"] if isinstance(part.get("enum"), list) else [part["const"]]
    return any(each == value and _kinds_of(each) == _kinds_of(value) for each in values)


def _allows(schema: Any, value: Any, root: _Root, depth: int) -> bool:
    if not _kinds(schema, root, depth) & _kinds_of(value):
        return False
    for part in _parts(schema, root, depth):
        if value is None and part.get("nullable") is True:
            continue
        if not _lists(part, value):
            return False
        for word in ("anyOf", "oneOf"):
            each = part.get(word)
            if isinstance(each, list) and depth < DEEP and not any(_allows(s, value, root, depth + 1) for s in each):
                return False
    return True


def _refuse(constant: str) -> None:
    raise ValueError(constant)
