"""{"name": ..., "parameters": {...}} as the whole answer, or after <|python_tag|> (Llama 3.1 and later)."""

from __future__ import annotations

from phasewise.serve.tools.calls import json_call
from phasewise.serve.tools.deltas import DeltaCollector, Steps
from phasewise.serve.tools.scan import KnownTools, call, spaces, until

TAG = "<|python_tag|>"
BETWEEN = ";,"  # calls, besides white space
OPENING = '{{"name": "{name}", "parameters": {{'
CLOSING = ""
TRIGGER, WHOLE = TAG, True
HELD = json_call
SHOWN = r'\{\\?"name\\?": [^{}]*\\?"parameters\\?":'
TOKENS = (TAG,)


def read(out: DeltaCollector, known: KnownTools) -> Steps:
    """Calls where the answer begins, after the tag, and one after the other; all else is content."""
    c, lead, plain, after = (yield), "", True, False
    while True:
        gap, c = yield from spaces(c, BETWEEN if after else "")
        held = ""
        if c == "{":
            calls = out.calls
            held, c = yield from call(out, c, known, plain)
            if out.calls > calls:
                lead, plain, after = "", True, True
                continue
        if after and plain and not (c or held):
            return  # nothing follows the last call
        mark, space, c = yield from until(out, c, (TAG,), lead + gap + held)
        if not mark:
            return
        lead, plain, after = space + mark, False, False
