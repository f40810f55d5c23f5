"""The textual form of a method: `name:knob=value,knob=(name:knob=value),part.knob=value`, and back.

    method = name [":" knob {"," knob}]
    knob   = key {"." key} "=" (plain | quoted | "(" method ")")

A plain value ends at a comma or at a parenthesis that closes none of its own. A quoted one stands between single
quotes, a quote within it is written twice; nothing but the text in between is meant, so 'none' is a word. Reading says
where it stopped and what it expected there. Methods that hand on to another one may be written as a chain,
`one+two:knob=value` (`chained`).
"""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from phasewise.errors import UserError

TRUTH = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}


class Quoted(str):
    """A value that was written in quotes: it is this text and never a word for something else."""

    __slots__ = ()


@dataclass(frozen=True)
class Spelled:
    """A method as text has it: values are text, or methods written in parentheses."""

    name: str
    knobs: Mapping[str, str | Spelled] = field(default_factory=dict)

    def __str__(self) -> str:
        """The text that `read` turns into this again."""
        knobs = ",".join(f"{key}={_written(value)}" for key, value in self.knobs.items())
        return f"{self.name}:{knobs}" if knobs else self.name


def read(text: str, what: str) -> Spelled:
    """The method that `text` spells. Raises UserError beginning with `what`, with the position of the mistake."""
    return _Reader(text, what).whole()


def chained(text: str) -> list[str]:
    """The methods of a chain, `one+two:knob=value`, in order. A plus sign counts where a name follows it, outside of
    quotes and parentheses."""
    found, start, depth, quoted = [], 0, 0, False
    for at, char in enumerate(text):
        quoted ^= char == "'"
        depth += 0 if quoted else (char == "(") - (char == ")")
        if char == "+" and not quoted and depth == 0 and (text[at + 1 :].lstrip()[:1].isalpha()):
            found.append(text[start:at])
            start = at + 1
    return [*found, text[start:]]


class _Reader:
    """Recursive descent over one text; `at` is the next character."""

    def __init__(self, text: str, what: str) -> None:
        self.text, self.what, self.at = text, what, 0

    def whole(self) -> Spelled:
        found = self.method(top=True)
        if self.at < len(self.text):
            raise self.wrong("',' or the end")
        return found

    def method(self, top: bool = False) -> Spelled:
        name = self.until(":,()")
        if not name and not top:  # an empty name is the catalogue's to refuse: it knows what there is
            raise self.wrong("the name of a method")
        knobs: dict[str, str | Spelled] = {}
        if self.next == ":":
            self.at += 1
            while self.next not in ("", ")"):
                if self.next == ",":
                    self.at += 1
                else:
                    self.knob(knobs)
        return Spelled(name, knobs)

    def knob(self, knobs: dict[str, str | Spelled]) -> None:
        start = self.at
        key = self.until("=,()")
        if self.next != "=":
            raise self.wrong(f"knob=value, '=' after {key!r}")
        if not key or key in knobs:
            self.at = start
            raise self.wrong(f"another knob, {key!r} being given already" if key else "knob=value")
        self.at += 1
        knobs[key] = self.value()
        if self.next not in ("", ",", ")"):
            raise self.wrong("',' or the end")

    def value(self) -> str | Spelled:
        if self.next == "'":
            return self.quoted()
        if self.next != "(":
            return self.plain()
        opened = self.at + 1
        self.at += 1
        found = self.method()
        if self.next != ")":
            raise self.wrong(f"')' for the '(' at character {opened}")
        self.at += 1
        return found

    def quoted(self) -> Quoted:
        opened, found = self.at + 1, ""
        while True:
            end = self.text.find("'", self.at + 1)
            if end < 0:
                self.at = len(self.text)
                raise self.wrong(f"a quote to close the one at character {opened}")
            found += self.text[self.at + 1 : end]
            self.at = end + 1
            if not self.text.startswith("'", self.at):
                return Quoted(found)
            found += "'"

    def plain(self) -> str:
        start, depth = self.at, 0
        while self.at < len(self.text):
            char = self.text[self.at]
            if not depth and char in ",)":
                break
            depth += (char == "(") - (char == ")")
            self.at += 1
        if depth:
            raise self.wrong("')'")
        return self.text[start : self.at].strip()

    @property
    def next(self) -> str:
        """The next character after any space, '' at the end."""
        while self.text[self.at : self.at + 1].isspace():
            self.at += 1
        return self.text[self.at : self.at + 1]

    def until(self, ends: str) -> str:
        start = self.at
        while self.at < len(self.text) and self.text[self.at] not in ends:
            self.at += 1
        return self.text[start : self.at].strip()

    def wrong(self, expected: str) -> UserError:
        rest = self.text[self.at :]
        found = f"found {rest[:12] + ('...' if len(rest) > 12 else '')!r}" if rest else "the text ends"
        return UserError(f"{self.what} {self.text!r}, character {self.at + 1}: expected {expected}, but {found}")


def _written(value: str | Spelled) -> str:
    if isinstance(value, Spelled):
        return f"({value})"
    plain = value and value.strip() == value and not value.startswith("'") and not set(value) & set(",()")
    if plain and not isinstance(value, Quoted):
        return str(value)
    return "'" + value.replace("'", "''") + "'"


# ---- values
def parse_value(text: str, kind: Any, what: str) -> Any:
    """A knob's value of type `kind` from text. Raises UserError beginning with `what`, naming value and choices."""
    if typing.get_origin(kind) is typing.Literal:
        choices = [str(c) for c in typing.get_args(kind)]
        if text not in choices:
            raise UserError(f"{what}={str(text)!r}: choose one of {', '.join(choices)}")
        return typing.get_args(kind)[choices.index(text)]
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return _one_of(text, typing.get_args(kind), what)
    if kind is bool:
        if text.lower() not in TRUTH:
            raise UserError(f"{what}={str(text)!r} is not a truth value: say true or false")
        return TRUTH[text.lower()]
    try:
        value = kind(text)
    except (TypeError, ValueError):
        raise UserError(f"{what}={str(text)!r} is not a valid {getattr(kind, '__name__', kind)}") from None
    if isinstance(value, float) and not abs(value) < float("inf"):
        raise UserError(f"{what}={str(text)!r} is not a finite number: choose one that is")
    return value


def _one_of(text: str, kinds: tuple[Any, ...], what: str) -> Any:
    """The first of several types that the text is a value of."""
    if types.NoneType in kinds and text.lower() == "none" and not isinstance(text, Quoted):
        return None
    kinds = tuple(k for k in kinds if k is not types.NoneType and not (isinstance(text, Quoted) and str in kinds))
    problem: UserError | None = None
    for kind in kinds or (str,):
        try:
            return parse_value(text, kind, what)
        except UserError as error:
            problem = error
    assert problem is not None
    raise problem


def spell_value(value: Any, kind: Any, what: str) -> str:
    """Text that `parse_value` turns into an equal value. Raises UserError if there is none."""
    text = str(value).lower() if value is None or isinstance(value, bool) else str(value)
    for candidate in (text, Quoted(text)):
        try:
            found = parse_value(candidate, kind, what)
        except UserError:
            continue
        if found == value:
            return candidate
    raise UserError(f"{what}={value!r} cannot be written as text")
