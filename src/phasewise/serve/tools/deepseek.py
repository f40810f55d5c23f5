"""<｜tool▁call▁begin｜>function<｜tool▁sep｜>f, and arguments in a fence of JSON (DeepSeek V3, R1), or
f<｜tool▁sep｜>{...} (V3.1): one or more of them between <｜tool▁calls▁begin｜> and <｜tool▁calls▁end｜>."""

from __future__ import annotations

from collections.abc import Generator

from phasewise.serve.tools.calls import json_call
from phasewise.serve.tools.deltas import DeltaCollector, Steps
from phasewise.serve.tools.scan import Brackets, KnownTools, balanced, spaces, until, word

FIRST, LAST = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
BEGIN, SEP, END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
FENCE = "```"
OPENING = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{{"
CLOSING = "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
TRIGGER, WHOLE = FIRST, False
HELD = json_call
SHOWN = r"<｜tool▁call▁begin｜>"
TOKENS = (FIRST, LAST, BEGIN, SEP, END)
LONGEST = 256  # characters of a name
Read = Generator[None, str, tuple[str, str]]  # what was read and is no call, and the next character


def read(out: DeltaCollector, known: KnownTools) -> Steps:
    """Content, and every call. What follows an opening and is no call is content, the opening included."""
    c, lead = (yield), ""
    while True:
        mark, space, c = yield from until(out, c, (FIRST, BEGIN, END, LAST), lead)
        if not mark:
            return
        lead = space + mark
        if mark == BEGIN:
            calls = out.calls
            held, c = yield from _call(out, c, known)
            lead = held if out.calls > calls else lead + held
        elif mark == FIRST:
            gap, c = yield from spaces(c)
            held, c = yield from word(c, BEGIN)
            lead += gap + held
            if held == BEGIN:
                calls = out.calls
                held, c = yield from _call(out, c, known)
                lead = held if out.calls > calls else lead + held
        elif out.calls and out.fresh:
            lead = ""


def _call(out: DeltaCollector, c: str, known: KnownTools) -> Read:
    """The name, perhaps after the word "function" and in front of a fence, and the object of arguments."""
    name, c = yield from _name(c)
    held, c = yield from word(c, SEP)
    said = name + held
    if held != SEP:
        return said, c
    if name == "function":
        name, c = yield from _name(c)
        gap, c = yield from spaces(c)
        fence, c = yield from word(c, FENCE + "json")
        said += name + gap + fence
        if fence != FENCE + "json":
            return said, c
    gap, c = yield from spaces(c)
    if c != "{" or not known(name):
        return said + gap, c
    out.call(name, "")
    brackets = Brackets()
    c = yield from balanced(out, c, brackets, 0)
    if brackets.depth or not said.endswith("json"):
        return "", c
    gap, c = yield from spaces(c)
    fence, c = yield from word(c, FENCE)
    return ("" if fence == FENCE else gap + fence), c


def _name(c: str) -> Read:
    name = ""
    while c and (c.isalnum() or c in "_.-") and len(name) < LONGEST:
        name += c
        c = yield
    return name, c
