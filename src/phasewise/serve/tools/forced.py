"""Answers that have to be a call: the grammar of a call in a model's format, arguments by their schema."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from phasewise.methods.sample._grammars import OPTIONS
from phasewise.serve.failures import ApiError

ENDS = {"{": "}", "[": "]"}


def grammar(tools: Sequence[Mapping[str, Any]], opening: str, closing: str, begun: bool) -> dict[str, Any]:
    """What to ask (`Params.ask`) for an answer that calls one of these tools. `opening` is what a call to {name} begins
    with, up to the brace of its arguments, `closing` what comes after the call; `begun`: there is one tool, and its
    opening, without that brace, is said already. Raises ApiError for a format whose arguments are not JSON."""
    opens_json(opening)
    rules = []
    for i, tool in enumerate(tools):
        before = opening.format(name=tool["function"]["name"])[:-1]
        first = "" if begun else json.dumps(before)
        after = closed(before) + closing
        rules.append(f"call{i}: {first} arguments{i} {json.dumps(after) if after else ''}")
        rules.append(f"arguments{i}: {arguments(tool['function'].get('parameters'))}")
    start = " | ".join(f"call{i}" for i in range(len(tools)))
    return {"grammar": "\n".join([f"start: {start}", *rules])}


def opens_json(opening: str) -> None:
    """Raise ApiError for a format whose arguments are not JSON."""
    if not opening.endswith("{"):
        raise ApiError(400, "this model writes the arguments of calls in a way that no schema can be held to: name one "
                       "tool in tool_choice, and leave strict out", "tools", "unsupported_parameter")  # fmt: skip


def arguments(schema: Mapping[str, Any] | None) -> str:
    """The right side of a rule for JSON of a schema, or for any object."""
    return f"%json {json.dumps({**(schema or {'type': 'object'}), 'x-guidance': OPTIONS})}"


def closed(text: str) -> str:
    """The brackets that are open at the end of a text, closed."""
    open_ones: list[str] = []
    for letter in text:
        if letter in ENDS:
            open_ones.append(letter)
        elif open_ones and letter == ENDS[open_ones[-1]]:
            open_ones.pop()
    return "".join(ENDS[letter] for letter in reversed(open_ones))
