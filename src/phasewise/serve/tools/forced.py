"""Answers that have to be a call: nothing but calls, by a grammar."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from phasewise.serve.failures import ApiError
from phasewise.serve.tools.asked import strict
from phasewise.serve.tools.calls import calls
from phasewise.serve.tools.formats import Format
from phasewise.serve.tools.spelling import Spelling

BLANKS = r"[ \t\r\n]{1,4}"  # between calls: endless blanks would be an answer that never ends
Ask = dict[str, Any]
Tool = Mapping[str, Any]


def grammar(tools: Sequence[Tool], format: Format, opening: str, spell: Spelling, single: bool) -> Ask:
    """The constraint (`Params.ask`) of an answer that calls these tools: one of them once if `single`, else one or
    more, one after the other. Arguments of `strict` tools follow their schema, those of others are any. Raises ApiError
    for a schema that the format cannot hold."""
    head, rules = calls(tools, format, opening, spell, single)
    start = f"{spell(head)} calls"
    if not single and format.trigger:  # where there is none, a list has all calls
        between = f"GAP? {spell(format.trigger)}" if head.endswith(format.trigger) else "/[;,]/? GAP"
        start += f" ({between} calls)*"
    return {"grammar": "\n".join([f"start: {start}", f"GAP: /{BLANKS}/", *rules])}


def held(must: Sequence[Tool], write: Callable[[Sequence[Tool]], Ask], can: Callable[[Ask], bool]) -> Ask | None:
    """Returns the first grammar that `write` makes of calls to these tools and that `can` be honoured: arguments follow
    their schema, and are any where that cannot be and the tool is not `strict`. None where no grammar can, and one tool
    is called without: where it has to be a grammar, what cannot be honoured is said where it is tried."""

    def honoured(tools: Sequence[Tool]) -> Ask | None:
        try:
            ask = write(tools)
        except ApiError:
            return None
        return ask if can(ask) else None

    every = [_strict(tool) for tool in must]
    found = honoured(every)
    if found is None and len(must) > 1:
        found = honoured([each if strict([tool]) or honoured([each]) else tool for tool, each in zip(must, every)])
    if found is None:
        found = write(must) if strict(must) or len(must) > 1 else honoured(must)
    return found


def _strict(tool: Tool) -> Tool:
    return {**tool, "function": {**tool["function"], "strict": True}}
