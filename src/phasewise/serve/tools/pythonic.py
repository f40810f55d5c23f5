"""[f(a=1, b="x"), g()] as the whole answer (Llama 3.2 and 4, ToolACE): Python's calls, told as JSON."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Generator

from phasewise.serve.tools.deltas import DeltaCollector, Steps
from phasewise.serve.tools.keyworded import keyworded_call
from phasewise.serve.tools.scan import KnownTools, name, spaces, until

START, END = "<|python_start|>", "<|python_end|>"
OPENING = "[{name}("
CLOSING = ""
TRIGGER, WHOLE = "", True
HELD = keyworded_call
SHOWN = r"\[\w+\(\w+="
TOKENS = (START, END)
DEEP = 64  # brackets within brackets
_JSON_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?")
_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "0": "\0",
            "\n": "", "\\": "\\", "'": "'", '"': '"'}  # fmt: skip
_DIGITS = {"x": 2, "u": 4, "U": 8}

Read = Generator[None, str, tuple[str, str]]  # what was read and is wrong (or is no call), and the next character
Fine = Generator[None, str, tuple[bool, str]]  # whether all is well so far, and the next character


def read(out: DeltaCollector, known: KnownTools) -> Steps:
    """A list of calls where the answer begins; all else, and what follows, is content."""
    c = yield
    gap, c = yield from spaces(c)
    start = ""
    while c and START.startswith(start + c):
        start += c
        c = yield
    held = ""
    if start in ("", START):
        between, c = yield from spaces(c)
        start += between
        if c == "[":
            held, c = yield from _list(out, c, known)
    lead = held if out.calls else gap + start + held
    while True:
        mark, space, c = yield from until(out, c, (END,), lead)
        if not mark:
            return
        lead = "" if out.calls and out.fresh else space + mark


def _list(out: DeltaCollector, c: str, known: KnownTools) -> Read:
    held, c = c, (yield)
    while c:
        gap, c = yield from spaces(c)
        held += gap
        said, c = yield from name(c)
        if c == "]" and not said and held.startswith(","):
            return "", (yield)
        if c != "(" or not known(said):
            return held + said, c
        out.call(said, "{")
        c = yield
        wrong, c = yield from arguments(out, c)
        if wrong is not None:
            return wrong, c
        gap, c = yield from spaces(c)
        if c == "]":
            return "", (yield)
        if c != ",":
            return gap, c
        held, c = ",", (yield)
    return held, c


def arguments(out: DeltaCollector, c: str) -> Generator[None, str, tuple[str | None, str]]:
    """a=1, b=2) as members of an object: None, or what was read and is wrong; and the next character."""
    first = True
    while True:
        held, c = yield from spaces(c)
        if c == ")":
            out.arguments("}")
            return None, (yield)
        key = ""
        while c and (c.isalnum() or c == "_"):
            key += c
            c = yield
        gap, c = yield from spaces(c)
        if not key.isidentifier() or c != "=":
            return held + key + gap, c
        out.arguments(f"{'' if first else ', '}{json.dumps(key, ensure_ascii=False)}: ")
        first = False
        _, c = yield from spaces((yield))
        fine, c = yield from _value(out, c, 0)
        if not fine:
            return "", c
        gap, c = yield from spaces(c)
        if c == ",":
            c = yield
        elif c != ")":
            return gap, c


def _value(out: DeltaCollector, c: str, depth: int) -> Fine:
    if c and c in "'\"":
        return (yield from _string(out, c))
    if c and c in "[({":
        return (yield from _container(out, c, depth + 1)) if depth < DEEP else (False, c)
    word = ""
    while c and (c.isalnum() or c in "_.+-") and len(word) < 400:
        word += c
        c = yield
    said = _literal(word)
    out.arguments(word if said is None else said)
    return said is not None, c


def _literal(word: str) -> str | None:
    """A name or number as JSON writes it, or None."""
    if word in _WORDS or _JSON_NUMBER.fullmatch(word):
        return _WORDS.get(word, word)
    try:
        return json.dumps(int(word, 0))
    except ValueError:
        pass
    try:
        value = float(word)
    except ValueError:
        return None
    return json.dumps(value) if math.isfinite(value) else None


def _container(out: DeltaCollector, c: str, depth: int) -> Fine:
    """A list, tuple or dictionary."""
    close, pairs = {"[": "]", "(": ")", "{": "}"}[c], c == "{"
    out.arguments("{" if pairs else "[")
    first, c = True, (yield)
    while True:
        _, c = yield from spaces(c)
        if c == close:
            out.arguments("}" if pairs else "]")
            return True, (yield)
        if not c or (pairs and c not in "'\""):
            return False, c
        out.arguments("" if first else ", ")
        first = False
        fine, c = yield from _value(out, c, depth)
        if fine and pairs:
            _, c = yield from spaces(c)
            if c != ":":
                return False, c
            out.arguments(": ")
            _, c = yield from spaces((yield))
            fine, c = yield from _value(out, c, depth)
        if not fine:
            return False, c
        _, c = yield from spaces(c)
        if c == ",":
            c = yield
        elif c != close:
            return False, c


def _string(out: DeltaCollector, quote: str) -> Fine:
    out.arguments('"')
    c = yield
    while c and c != quote:
        if c == "\\":
            c = yield
            if c in _DIGITS:
                c = yield from _code(out, c)
                continue
            out.arguments(_inside(_ESCAPES.get(c, "\\" + c)))
        else:
            out.arguments(_inside(c))
        if c:
            c = yield
    if not c:
        return False, c
    out.arguments('"')
    return True, (yield)


def _code(out: DeltaCollector, kind: str) -> Generator[None, str, str]:
    """The digits after a backslash and x, u or U; too few of them are text. The next character."""
    digits, c = "", (yield)
    while c and c in "0123456789abcdefABCDEF" and len(digits) < _DIGITS[kind]:
        digits += c
        c = yield
    if len(digits) < _DIGITS[kind] or int(digits, 16) > 0x10FFFF:
        out.arguments(_inside("\\" + kind + digits))
    elif kind == "U":
        out.arguments(json.dumps(chr(int(digits, 16)))[1:-1])
    else:
        out.arguments("\\u" + digits.rjust(4, "0"))
    return c


def _inside(text: str) -> str:
    """Text as it stands within a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]
