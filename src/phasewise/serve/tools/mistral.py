"""[TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...], or [TOOL_CALLS]name[ARGS]{...} since version 11 (Mistral)."""

from __future__ import annotations

from collections.abc import Generator

from phasewise.serve.tools.calls import json_call
from phasewise.serve.tools.deltas import DeltaCollector, Steps
from phasewise.serve.tools.scan import Brackets, KnownTools, balanced, call, name, spaces, until

MARK, ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
OPENING = '[TOOL_CALLS] [{{"name": "{name}", "arguments": {{'
CLOSING = ""
TRIGGER, WHOLE = MARK, False
HELD = json_call
SHOWN = r"\[TOOL_CALLS\]"
TOKENS = (MARK, ID, ARGS)


def read(out: DeltaCollector, known: KnownTools) -> Steps:
    """Content, and the calls after every mark. What follows a mark and is no call is content, the mark included."""
    c, lead = (yield), ""
    while True:
        mark, space, c = yield from until(out, c, (MARK,), lead)
        if not mark:
            return
        gap, c = yield from spaces(c)
        calls = out.calls
        if c == "[":
            held, c = yield from _several(out, c, known)
        elif c == "{":
            held, c = yield from call(out, c, known)
        else:
            held, c = yield from _named(out, c, known)
        lead = held if out.calls > calls else space + mark + gap + held


def _several(out: DeltaCollector, c: str, known: KnownTools) -> Generator[None, str, tuple[str, str]]:
    """A list of calls; what was read since the last of them, if the list is none, and the next character."""
    read, c = c, (yield)
    while c:
        gap, c = yield from spaces(c, ",")
        if c == "]":
            return (read + gap + c if read else ""), (yield)
        if c != "{":
            return (read + gap if c or read else ""), c
        held, c = yield from call(out, c, known)
        if held:
            return read + gap + held, c
        read = ""
    return read, c


def _named(out: DeltaCollector, c: str, known: KnownTools) -> Generator[None, str, tuple[str, str]]:
    """A name, perhaps an id, and the object of arguments; what was read, if that is no call, and the next character."""
    said, c = yield from name(c)
    held, tag = said, ""
    while c == "[" and tag != ARGS:
        tag, c = yield from _tag(c)
        held += tag
        if tag not in (ID, ARGS):
            return held, c
        if tag == ID:
            given, c = yield from name(c)
            held += given
    if c != "{" or not known(said):
        return held, c
    out.call(said, "")
    return "", (yield from balanced(out, c, Brackets(), 0))


def _tag(c: str) -> Generator[None, str, tuple[str, str]]:
    tag = ""
    while c and any(each.startswith(tag + c) for each in (ID, ARGS)):
        tag += c
        c = yield
    return tag, c
