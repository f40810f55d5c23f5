"""The grammar of a call in the format of a model: its name, and arguments that follow their schema or are any."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from phasewise.serve.failures import ApiError
from phasewise.serve.tools.spelling import Spelling

if TYPE_CHECKING:
    from phasewise.serve.tools.formats import Format

ENDS = {"{": "}", "[": "]"}
FENCE = "```"


def calls(
    tools: Sequence[Mapping[str, Any]], format: Format, opening: str, spell: Spelling, single: bool = False
) -> tuple[str, list[str]]:
    """Returns the text before calls in a format, its trigger included, and rules: `calls` is what follows, a call or a
    list. `opening`: what a call to {name} begins with; `single`: a list has one. Arguments of `strict` tools follow
    their schema, those of others are any. Raises ApiError for a schema that the format cannot hold."""
    rules, lead, head = list[str](), "", ""
    for i, tool in enumerate(tools):
        function = tool["function"]
        head, trigger, before = _cut(opening.format(name=function["name"]), format.trigger)
        head += trigger
        lead, bracket, item = before.partition("[") if before.lstrip().startswith("[") else ("", "", before)
        lead += bracket
        if not (trigger or lead):
            head, item = item[: len(item) - len(item.lstrip())], item.lstrip()
        rules += format.held(f"call{i}", function, item, spell)
    any_ = " | ".join(f"call{i}" for i in range(len(tools)))
    more = "" if single else " (/, ?/ call)*"
    several = f'{spell(lead)} call{more} "]"' if lead else "call"
    return head, [f"call: {any_}", f"calls: {several} {spell(format.closing)}", *rules]


def json_call(rule: str, function: Mapping[str, Any], item: str, spell: Spelling) -> list[str]:
    """The rules of a call whose arguments are JSON; `item` is what it begins with, up to their brace."""
    before = item[:-1]
    fence = f"\n{FENCE}" if FENCE in before else ""
    return [
        f"{rule}: {spell(before)} {rule}_arguments {spell(closed(before) + fence)}",
        f"{rule}_arguments: {arguments(function)}",
    ]


def arguments(function: Mapping[str, Any]) -> str:
    """The right side of a rule for the arguments of a function as JSON: of their schema, or any object."""
    return schema_rule(of_object(function)) if function.get("strict") else schema_rule({"type": "object"})


def of_object(function: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of a function's parameters, which are an object whether it says so or not. Raises ApiError where they
    cannot be one."""
    schema = {"type": "object", **(function.get("parameters") or {})}
    kinds = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    if "object" not in kinds:
        raise refused(function, f"type {schema['type']!r}: arguments are an object")
    return {**schema, "type": "object"}


def refused(function: Mapping[str, Any], what: str) -> ApiError:
    """A keyword of a schema that cannot be honoured."""
    return ApiError(400, f"tools: the parameters of {function['name']} have {what}, which cannot be honoured: change "
                    "it, or leave strict out", "tools", "invalid_value")  # fmt: skip


def schema_rule(schema: Any) -> str:
    """The right side of a rule for JSON of a schema."""
    from phasewise.methods.sample._grammars import OPTIONS  # not for those who only want the names of formats

    return f"%json {json.dumps({**schema, 'x-guidance': OPTIONS})}"


def closed(text: str) -> str:
    """The brackets that are open at the end of a text, closed."""
    open_ones: list[str] = []
    for letter in text:
        if letter in ENDS:
            open_ones.append(letter)
        elif open_ones and letter == ENDS[open_ones[-1]]:
            open_ones.pop()
    return "".join(ENDS[letter] for letter in reversed(open_ones))


def _cut(opening: str, trigger: str) -> tuple[str, str, str]:
    """Splits a text into what stands before the trigger, the trigger, and what follows it."""
    head, found, before = opening.rpartition(trigger) if trigger else ("", "", opening)
    return head, found, before
