"""Shared scanners of all formats: text up to a mark, and the JSON object of one call.

Readers are generators that are sent characters; each is given the first one, `c`, and returns the first that it did not
use ("" is the end of the text). So however a text is cut into pieces, what is read is the same.
"""

from __future__ import annotations

import json
import re
import string
from collections.abc import Collection, Generator, Mapping
from dataclasses import dataclass, field
from typing import Any

from phasewise.serve.tools.deltas import DeltaCollector, Kind
from phasewise.serve.tools.typed import ArgumentType, argument

OUTSIDE = frozenset(string.ascii_letters + string.digits + string.whitespace + "+-.,:")  # of JSON, between strings
CLOSES = {"{": "}", "[": "]"}
_STRING = r'"(?:[^"\\]|\\.)*"'
_HEAD = re.compile(
    rf'\{{\s*(?:"(?:type|id)"\s*:\s*{_STRING}\s*,\s*)*"name"\s*:\s*({_STRING})\s*,\s*"(?:arguments|parameters)"\s*:\s*\{{',
    re.DOTALL,
)
_FIRST = re.compile(r'\{\s*"(?:name|type|id)"\s*:')


@dataclass(frozen=True)
class KnownTools:
    """The tools that a request has; `schemas` of their parameters, as far as readers need to know them."""

    names: frozenset[str]
    schemas: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, name: str) -> bool:
        return name in self.names

    def argument(self, name: str, key: str) -> ArgumentType:
        """Returns what the schema of a tool says of a parameter."""
        return argument(self.schemas.get(name), key)


def spaces(c: str, besides: str = "") -> Generator[None, str, tuple[str, str]]:
    """White space (and these characters); what it was, and the next character."""
    held: list[str] = []
    while c and (c.isspace() or c in besides):
        held.append(c)
        c = yield
    return "".join(held), c


def until(
    out: DeltaCollector, c: str, marks: Collection[str], lead: str = "", kind: Kind = "content"
) -> Generator[None, str, tuple[str, str, str]]:
    """Text up to one of the marks: which ("" at the end), the white space before it, and the next character.

    White space after a call or reasoning is dropped. `lead` is text that came before `c`, and has no mark in it.
    """
    lead = lead.lstrip() if out.fresh else lead
    body, held = lead.rstrip(), ""
    space = [lead[len(body) :]]
    out.text(body, kind)
    while c:
        held += c
        while held and not any(mark.startswith(held) for mark in marks):
            first, held = held[0], held[1:]
            if first.isspace():
                space.append(first)
            else:
                out.text(first if out.fresh else "".join(space) + first, kind)
                space = []
        c = yield
        if held in marks:
            return held, "" if out.fresh else "".join(space), c
    if held or not out.fresh:
        out.text(("" if out.fresh else "".join(space)) + held, kind)
    return "", "", ""


class Brackets:
    """Follows JSON as far as strings and brackets go; `depth` of them are open."""

    def __init__(self) -> None:
        self.quoted = False
        self._open: list[str] = []
        self._escaped = False

    @property
    def depth(self) -> int:
        return len(self._open)

    def step(self, c: str) -> bool:
        """One more character. False if it cannot be there."""
        if self.quoted:
            self.quoted = self._escaped or c != '"'
            self._escaped = c == "\\" and not self._escaped
        elif c == '"':
            self.quoted = True
        elif c in CLOSES:
            self._open.append(CLOSES[c])
        elif c in "}]":
            if not self._open or self._open[-1] != c:
                return False
            self._open.pop()
        return self.quoted or c in '"{}[]' or c in OUTSIDE


def balanced(out: DeltaCollector, c: str, brackets: Brackets, depth: int) -> Generator[None, str, str]:
    """Arguments as they come, until no more than `depth` brackets are open, or what follows is no JSON."""
    while c and brackets.step(c):
        out.arguments(c)
        closed = brackets.depth <= depth
        c = yield
        if closed:
            break
    return c


def call(out: DeltaCollector, c: str, known: KnownTools, plain: bool = False) -> Generator[None, str, tuple[str, str]]:
    """The object {"name": ..., "arguments": {...}} that begins with `c`, which is a "{".

    Once the name of a known tool and the opening of its arguments stand, the call has begun, and its arguments are
    handed on as they come, as the model writes them. Keys in another order are read when the object is complete.
    Returns what was read, if that is no call, and the next character. `plain`: nothing but its keys says that the
    object may be a call; one that begins with another is given back at once.
    """
    brackets, held = Brackets(), ""
    while c and brackets.step(c):
        held += c
        if brackets.depth == 0:
            return ("" if _whole(out, held, known) else held), (yield)
        if plain and c == ":" and brackets.depth == 1 and not (brackets.quoted or _FIRST.match(held)):
            return held, (yield)
        opens = c == "{" and brackets.depth == 2 and not brackets.quoted
        name = _name(held) if opens else None
        if name is not None and known(name):
            out.call(name, "{")
            return "", (yield from _rest(out, (yield), brackets))
        c = yield
    return held, c


def _rest(out: DeltaCollector, c: str, brackets: Brackets) -> Generator[None, str, str]:
    """The arguments, and what their object still has."""
    c = yield from balanced(out, c, brackets, 1)
    if brackets.depth > 1:
        return c
    while c and brackets.step(c):
        depth = brackets.depth
        c = yield
        if not depth:
            break
    return c


def _name(held: str) -> str | None:
    found = _HEAD.fullmatch(held)
    try:
        return None if found is None else str(json.loads(found[1]))
    except ValueError:
        return None


def _whole(out: DeltaCollector, held: str, known: KnownTools) -> bool:
    """True if a complete object is a call, which is then emitted."""
    try:
        value = json.loads(held)
        arguments = value.get("arguments", value.get("parameters"))
        if isinstance(arguments, str):
            arguments = json.loads(arguments)
        text = json.dumps(arguments or {}, ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):
        return False
    name = value.get("name")
    if not isinstance(name, str) or not known(name) or not isinstance(arguments, dict | None):
        return False
    out.call(name, text)
    return True


def word(c: str, wanted: str) -> Generator[None, str, tuple[str, str]]:
    """Reads as much of a word as there is, and the next character."""
    held = ""
    while c and held != wanted and wanted.startswith(held + c):
        held += c
        c = yield
    return held, c


def name(c: str) -> Generator[None, str, tuple[str, str]]:
    """Reads what may be a tool's name, and the next character."""
    held = ""
    while c and (c.isalnum() or c in "_.-"):
        held += c
        c = yield
    return held, c
