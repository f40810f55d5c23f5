"""<tool_call>{"name": ..., "arguments": {...}}</tool_call>, anywhere and several times (Hermes, Qwen, SmolLM3)."""

from __future__ import annotations

from phasewise.serve.tools.calls import json_call
from phasewise.serve.tools.deltas import DeltaCollector, Steps
from phasewise.serve.tools.scan import KnownTools, call, spaces, until

OPEN, CLOSE = "<tool_call>", "</tool_call>"
OPENING = '<tool_call>\n{{"name": "{name}", "arguments": {{'
CLOSING = "\n</tool_call>"
TRIGGER, WHOLE = OPEN, False
HELD = json_call
SHOWN = r"<tool_call>(?:\\n|\s)*\{"  # where a template describes such calls
TOKENS = (OPEN, CLOSE)


def read(out: DeltaCollector, known: KnownTools) -> Steps:
    """Content, and every call. What follows an opening and is no call is content, the opening included."""
    c, lead, due = (yield), "", False
    while True:
        mark, space, c = yield from until(out, c, (OPEN, CLOSE), lead)
        if not mark:
            return
        lead = space + mark
        if mark == OPEN:
            calls = out.calls
            gap, c = yield from spaces(c)
            held, c = (yield from call(out, c, known)) if c == "{" else ("", c)
            due = out.calls > calls
            lead = "" if due else lead + gap + held
        elif due and out.fresh:
            due, lead = False, ""
