"""Answers that may be calls: free text, and from the opening of a call on what its tool's schema allows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from phasewise.serve.failures import ApiError
from phasewise.serve.tools.calls import calls
from phasewise.serve.tools.formats import Format
from phasewise.serve.tools.reasoning import Tags
from phasewise.serve.tools.spelling import Spelling, quoted

ANY, BLANK = r"(.|\n)*", r"[ \t\r\n]"
TERMINALS = [f"TEXT: /{ANY}/", f"SPACE: /{BLANK}+/"]


def grammar(
    tools: Sequence[Mapping[str, Any]], format: Format, opening: str, spell: Spelling, tags: Tags | None, opened: bool
) -> dict[str, Any]:
    """The constraint (`Params.ask`) of an answer that may call some of these tools. `opening`: what a call to {name}
    begins with. Between the `tags` of reasoning, of which the prompt may have `opened` one, nothing is a call. Raises
    ApiError for a format in which calls have no beginning of their own, and a schema that the format cannot hold."""
    if not format.trigger:
        raise ApiError(400, f"calls of the format {format.name} have no beginning of their own: name one tool in "
                       "tool_choice, or leave strict out", "tools", "unsupported_parameter")  # fmt: skip
    first = rf"/{BLANK}*([^{{ \t\r\n]{ANY})?/" if format.whole else f"/{ANY}/"
    rules = ["start: body"]
    if tags is not None:
        open_ = "" if opened else "open"
        rules = [f"start: {open_} thought body | {open_} TEXT" + ("" if opened else " | body")]
        rules += spell.upto("thought", "TEXT", tags.close)
        if not opened and tags.open in spell.words:
            rules.append(f"open: SPACE? {spell.token(tags.open)}")
        elif not opened:
            rules += ["open: OPEN", f"OPEN: /{BLANK}*/ {quoted(tags.open)}"]
            first += f" & ~(/{BLANK}*/ {quoted(tags.open)} /{ANY}/)"
    rules += [f"FIRST: {first}", *spell.upto("first", "FIRST", format.trigger)]
    if format.whole:
        rules += ["body: FIRST | (first SPACE? | SPACE?) calls (SEPARATOR? calls)*", r"SEPARATOR: /[ \t\r\n;,]+/"]
    else:
        rules += ["body: FIRST | first calls (more calls)* TEXT", *spell.upto("more", "TEXT", format.trigger)]
    return {"grammar": "\n".join([*rules, *calls(tools, format, opening, spell)[1], *TERMINALS])}
