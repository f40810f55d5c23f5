"""A fence of tool_code with calls in it, anywhere: f(city="Oslo"), print(f(...)) or [f(...), g()] (Gemma 3)."""

from __future__ import annotations

from phasewise.serve.tools.deltas import DeltaCollector, Steps
from phasewise.serve.tools.keyworded import keyworded_call
from phasewise.serve.tools.pythonic import Read, arguments
from phasewise.serve.tools.scan import KnownTools, name, spaces, until, word

FENCE, PRINT = "```", "print"
OPEN = FENCE + "tool_code"
OPENING = "```tool_code\n{name}("
CLOSING = "\n```"
TRIGGER, WHOLE = OPEN, False
HELD = keyworded_call
SHOWN = OPEN
TOKENS = ()


def read(out: DeltaCollector, known: KnownTools) -> Steps:
    """Content, and the calls of every fence. What is no call there is content, and so is a fence without any."""
    c, lead = (yield), ""
    while True:
        mark, space, c = yield from until(out, c, (OPEN,), lead)
        if not mark:
            return
        calls = out.calls
        held, c = yield from _fenced(out, c, known)
        lead = held if out.calls > calls else space + mark + held


def _fenced(out: DeltaCollector, c: str, known: KnownTools) -> Read:
    """Calls up to the end of the fence; what was read since the last of them and is no call, and the next character."""
    listed, calls, held = False, out.calls, ""
    while True:
        after = out.calls > calls
        gap, c = yield from spaces(c, ",;" if after else "")
        held += gap
        if (c == "[" and not (listed or after)) or (c == "]" and listed and after):
            listed, held, c = not listed, "" if after else held + c, (yield)
            continue
        if c == "`":
            fence, c = yield from word(c, FENCE)
            return ("" if after and fence == FENCE else held + fence), c
        said, c = yield from name(c)
        printed = said == PRINT and c == "("
        if printed:
            gap, c = yield from spaces((yield))
            held += f"{PRINT}({gap}"
            said, c = yield from name(c)
        if c != "(" or not known(said):
            return ("" if after and not (said or c) else held + said), c
        out.call(said, "{")
        wrong, c = yield from arguments(out, (yield))
        if wrong is None and printed:
            gap, c = yield from spaces(c)
            wrong, c = (None, (yield)) if c == ")" else (gap, c)
        if wrong is not None:
            return wrong, c
        held = ""
