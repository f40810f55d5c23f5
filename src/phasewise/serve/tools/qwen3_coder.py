"""<tool_call><function=f><parameter=x>value</parameter></function></tool_call>, anywhere (Qwen3-Coder): told as JSON.

Values are text between tags, one line break on either side of them. What a parameter's schema does not hold to be text
is told as JSON when all of it is there (typed.py).
"""

from __future__ import annotations

import json
from collections.abc import Generator

from phasewise.serve.tools.deltas import DeltaCollector, Steps
from phasewise.serve.tools.scan import KnownTools, spaces, until, word
from phasewise.serve.tools.tagged import DONE, END, PARAMETER, tagged_call
from phasewise.serve.tools.typed import ArgumentType

OPEN, CLOSE, FUNCTION = "<tool_call>", "</tool_call>", "<function="
OPENING = "<tool_call>\n<function={name}>\n"
CLOSING = "</tool_call>"
TRIGGER, WHOLE = OPEN, False
HELD = tagged_call
SHOWN = r"<function="
TOKENS = (OPEN, CLOSE)
LONGEST = 256  # characters of a name, which no tag may exceed
NULL = "null"
Read = Generator[None, str, tuple[str, str]]  # what was read and is not used, and the next character


def read(out: DeltaCollector, known: KnownTools) -> Steps:
    """Content, and every call. What follows an opening and is no call is content, the opening included."""
    c, lead, due = (yield), "", False
    while True:
        mark, space, c = yield from until(out, c, (OPEN, CLOSE, FUNCTION), lead)
        if not mark:
            return
        lead = space + mark
        if mark == CLOSE:
            lead = "" if due and out.fresh else lead
            due = False
            continue
        calls = out.calls
        if mark == OPEN:
            gap, c = yield from spaces(c)
            held, c = yield from word(c, FUNCTION)
            lead += gap + held
            if held != FUNCTION:
                continue
        held, c = yield from _function(out, c, known)
        due = out.calls > calls
        lead = held if due else lead + held


def _function(out: DeltaCollector, c: str, known: KnownTools) -> Read:
    """name>, parameters, and the end."""
    name, c = yield from _name(c)
    if not name.endswith(">") or not known(name[:-1]):
        return name, c
    out.call(name[:-1], "{")
    first = True
    while True:
        gap, c = yield from spaces(c)
        tag, c = yield from _tag(c)
        if tag == PARAMETER:
            key, c = yield from _name(c)
            if key.endswith(">"):
                out.arguments(f"{'' if first else ', '}{json.dumps(key[:-1], ensure_ascii=False)}: ")
                first = False
                kind = known.argument(name[:-1], key[:-1])
                whole, c = yield from (_text(out, c) if kind.is_text else _value(out, c, kind))
                if whole:
                    continue
                return "", c
            tag += key
        if tag == END:
            out.arguments("}")
            return "", c
        return (gap if tag or c else "") + tag, c


def _text(out: DeltaCollector, c: str, begun: str = "") -> Generator[None, str, tuple[bool, str]]:
    """A text, as it comes; whether its end came, too. `begun`: what has come of it."""
    out.arguments('"')
    if not begun:
        c = yield from _after_break(c)
    held = ""
    for letter in begun:
        held = _said(out, held + letter)
    while c:
        held = _said(out, held + c)
        c = yield
        if held in (DONE, f"\n{DONE}"):
            out.arguments('"')
            return True, c
    out.arguments(_inside(held))
    return False, ""


def _said(out: DeltaCollector, held: str) -> str:
    """Tell what can be no part of the tag that ends a text; what may be one is held."""
    while held and not (f"\n{DONE}".startswith(held) or DONE.startswith(held)):
        out.arguments(_inside(held[0]))
        held = held[1:]
    return held


def _value(out: DeltaCollector, c: str, kind: ArgumentType) -> Generator[None, str, tuple[bool, str]]:
    """The same of a value that is told when all of it is there, or, where it is a text if it is not null, once it
    cannot be that."""
    c, held = (yield from _after_break(c)), ""
    while c and not held.endswith(DONE):
        held += c
        if kind.is_text_or_null and not any(end.startswith(held) for end in (NULL + DONE, f"{NULL}\n{DONE}")):
            return (yield from _text(out, (yield), held))
        c = yield
    if not held.endswith(DONE):
        out.arguments(held)
        return False, c
    out.arguments(kind.told(held.removesuffix(DONE).removesuffix("\n")))
    return True, c


def _after_break(c: str) -> Generator[None, str, str]:
    """The next character, one line break left out."""
    if c == "\n":
        c = yield
    return c


def _name(c: str) -> Read:
    """Up to the end of a tag; without that end if there is none near."""
    name = ""
    while c and c not in "<\n" and len(name) < LONGEST:
        name += c
        if c == ">":
            return name, (yield)
        c = yield
    return name, c


def _tag(c: str) -> Read:
    """Reads as much of either tag as there is."""
    held = ""
    while c and held not in (PARAMETER, END) and any(tag.startswith(held + c) for tag in (PARAMETER, END)):
        held += c
        c = yield
    return held, c


def _inside(text: str) -> str:
    """Text as it stands within a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]
