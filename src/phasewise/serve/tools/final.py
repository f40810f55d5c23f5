"""Answers whose last words follow a grammar: after reasoning, and instead of calls where there are tools."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from phasewise.serve.tools.calls import closed, of_object, schema_rule
from phasewise.serve.tools.forced import grammar
from phasewise.serve.tools.formats import Format
from phasewise.serve.tools.members import DEFINITIONS
from phasewise.serve.tools.reasoning import Tags
from phasewise.serve.tools.spelling import Spelling

GAP = r"GAP: /[ \t\r\n]{1,4}/"  # beside the tags of reasoning: endless blanks would be an answer that never ends
Ask = dict[str, Any]


def around(tags: Tags | None, opened: bool, gap: bool, calls: Ask | None, spell: Spelling) -> Ask:
    """Returns what is asked besides the answer (`Params.ask`): grammars around it, and how reasoning ends.

    The text may begin with reasoning between `tags`, and does where the prompt has `opened` it. Then comes the answer,
    or what `calls` asks for. `gap`: blanks may stand beside the reasoning, as no answer begins with such.
    """
    rules = [f"body: @answer{'' if calls is None else ' | @calls'}"]
    grammars: dict[str, str] = {} if calls is None else {"calls": calls["grammar"]}
    if tags is None:
        return {"around": {"start": "\n".join(["start: body", *rules]), **grammars}}
    blank = " GAP?" if gap else ""
    rules += ["TEXT: /(.|\\n)*/", *([GAP] if gap else []), *spell.upto("thought", "TEXT", tags.close)]
    start = f"thought{blank} body" if opened else f"({blank} {spell(tags.open)} thought{blank})? body"
    reasoning = {"open": tags.open, "close": tags.close, "opened": opened}
    return {"around": {"start": "\n".join([f"start: {start}", *rules]), **grammars}, "reasoning": reasoning}


def calls(tools: Sequence[Mapping[str, Any]], format: Format, opening: str, spell: Spelling, single: bool) -> Ask:
    """The constraint of calls that stand where other JSON may. Those that are nothing but an object are JSON of a
    schema: as text they would share a beginning with that JSON, and llguidance keeps the longer text alone. Raises
    ApiError for a schema that the format cannot hold."""
    if not opening.format(name="").startswith("{"):
        return grammar(tools, format, opening, spell, single)
    rules = list[str]()
    for i, tool in enumerate(tools):
        function, begun = tool["function"], opening.format(name=tool["function"]["name"])
        *fixed, (last, _) = json.loads(begun + closed(begun)).items()
        arguments = of_object(function) if function.get("strict") else {"type": "object"}
        members = {**{key: {"const": value} for key, value in fixed}, last: arguments}
        shared = {name: arguments.pop(name) for name in DEFINITIONS if name in arguments}
        whole = {
            "type": "object",
            "properties": members,
            "required": [*members],
            "additionalProperties": False,
            **shared,
        }
        rules.append(f"call{i}: {schema_rule(whole)}")
    more = "" if single else r" (/[;,]/? GAP call)*"
    return {"grammar": "\n".join([f"start: call{more}", f"call: {' | '.join(f'call{i}' for i in range(len(tools)))}",
                                  *([] if single else [GAP]), *rules])}  # fmt: skip


def blanks_may_come_first(ask: Mapping[str, Any]) -> bool:
    """True unless it is certain that no text of what is asked begins with white space."""
    if "choice" in ask:
        return any(text[:1].isspace() for text in ask["choice"])
    return "json_schema" not in ask
