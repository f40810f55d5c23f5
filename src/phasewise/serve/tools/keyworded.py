"""The grammar of a call as Python writes it: f(city="Oslo", days=2), arguments by name, values as JSON writes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from phasewise.serve.tools.calls import refused, schema_rule
from phasewise.serve.tools.members import members
from phasewise.serve.tools.spelling import Spelling, quoted

KEY = "/[A-Za-z_][A-Za-z0-9_]{0,63}/"
WORDS = {"boolean": '"True" | "False"', "null": '"None"'}


def keyworded_call(rule: str, function: Mapping[str, Any], item: str, spell: Spelling) -> list[str]:
    """The rules of a call; `item` is what it begins with, its parentheses included. Arguments come in the order of the
    schema; those that must not be there may be left out."""
    end = quoted(")" * item.count("("))
    if not function.get("strict"):
        any_ = f'{KEY} "=" {rule}_any'
        return [f'{rule}: {spell(item)} ({any_} (", " {any_})*)? {end}', f"{rule}_any: {schema_rule({})}"]
    every = members(function)
    rules = [f"{rule}: {spell(item)} {rule}_first {end}"]
    for i, member in enumerate(every):
        if not member.key.isidentifier():
            raise refused(function, f"properties: {member.key!r}, which is no name in Python")
        kind = member.schema.get("type")
        plain = isinstance(kind, str) and kind in WORDS and not {"enum", "const"} & member.schema.keys()
        rules.append(f"{rule}_{i}_value: {WORDS[str(kind)] if plain else schema_rule(member.schema)}")
        rules.append(f"{rule}_{i}: {quoted(member.key + '=')} {rule}_{i}_value")
        further = f'", " {rule}_{i} {rule}_{i + 1}_on'  # after another argument
        rules.append(f"{rule}_{i}_on: {further}" + ("" if member.required else f" | {rule}_{i + 1}_on"))
    rules.append(f'{rule}_{len(every)}_on: ""')
    first = next((i for i, member in enumerate(every) if member.required), len(every))
    begins = [f"{rule}_{i} {rule}_{i + 1}_on" for i in range(min(first + 1, len(every)))]
    rules.append(f"{rule}_first: " + " | ".join([*begins, *(['""'] if first == len(every) else [])]))
    return rules
