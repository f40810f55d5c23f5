"""The grammar of a call between tags, as Qwen3-Coder writes it: <parameter=key>, a line break, and a value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from phasewise.serve.tools.calls import refused, schema_rule
from phasewise.serve.tools.members import ABOUT, DEFINITIONS, ToolArgument, members, only
from phasewise.serve.tools.spelling import Spelling, quoted
from phasewise.serve.tools.typed import ArgumentType, plain

PARAMETER, DONE, END = "<parameter=", "</parameter>", "</function>"
KEY = "/[A-Za-z_][A-Za-z0-9_.-]{0,63}/"
TEXT = {"type", "enum", "const", "minLength", "maxLength", *DEFINITIONS, *ABOUT}


def tagged_call(rule: str, function: Mapping[str, Any], item: str, spell: Spelling) -> list[str]:
    """The rules of a call; `item` is what it begins with. A text is any without the tag that ends it, or one of an
    enum; any other value is JSON of its schema. Parameters come in the order of the schema."""
    if not function.get("strict"):
        any_ = f'"{PARAMETER}" {KEY} ">\\n" {rule}_any "\\n"'
        return [f'{rule}: {spell(item)} ({any_})* "{END}\\n"', _text(f"{rule}_any", "")]
    rules, parts = list[str](), []
    for i, member in enumerate(members(function)):
        name = f"{rule}_{i}"
        opened = quoted(f"{PARAMETER}{member.key}>\n")
        parts.append(name if member.required else f"{name}?")
        if _forbidden(member.key):
            raise refused(function, f"properties: {member.key!r}, which no tag can name")
        kind = ArgumentType(member.schema, member.schema)
        if kind.is_text or kind.is_text_or_null:
            rules += _said(name, opened, member, function, kind.is_text_or_null)
        else:
            rules += [f'{name}: {opened} {name}_value "\\n{DONE}\\n"', f"{name}_value: {schema_rule(member.schema)}"]
    return [f'{rule}: {spell(item)} {" ".join(parts)} "{END}\\n"', *rules]


def _said(name: str, opened: str, member: ToolArgument, function: Mapping[str, Any], null: bool) -> list[str]:
    """The rules of a parameter that is text, or that or null."""
    schema = plain(member.schema, member.schema)
    only(function, schema, TEXT)
    low, high = schema.get("minLength", 0), schema.get("maxLength", "")
    if "enum" in schema or "const" in schema:
        values = [*_values(schema, member.key, function), *(["null"] if null else [])]
        either = " | ".join(quoted(f"{value}\n{DONE}\n") for value in values)
        return [f"{name}: {opened} ({either})"]
    if not all(type(bound) is int and bound >= 0 for bound in (low, high or 0)):
        raise refused(function, f"a minLength or maxLength of {member.key} that is no whole number")
    bounds = f"{{{low},{high}}}" if low or high != "" else ""
    return [f'{name}: {opened} {name}_text "\\n"', _text(f"{name}_text", bounds)]


def _values(schema: Mapping[str, Any], key: str, function: Mapping[str, Any]) -> list[str]:
    """The texts that an enum or a const allows. Raises what `refused` makes where they are not all texts."""
    listed, only_one = schema.get("enum", [schema.get("const")]), "const" in schema
    values = listed if isinstance(listed, list) else [listed]
    values = [each for each in values if not only_one or each == schema["const"]]
    wrong = any(not isinstance(value, str) or DONE in value for value in values)
    if wrong or not values or {"minLength", "maxLength"} & schema.keys():
        raise refused(function, f"an enum of {key} that is not written as text")
    return values


def _text(rule: str, bounds: str) -> str:
    """The rule of a text up to the first tag that ends it, with so many characters."""
    if not bounds:
        return f"{rule}[lazy]: /(.|\\n)*/ {quoted(DONE)}"
    return f"{rule}[lazy]: (/(.|\\n){bounds}/ & ~/(.|\\n)*<\\/parameter>(.|\\n)*/) {quoted(chr(10) + DONE)}"


def _forbidden(key: str) -> bool:
    return not key or any(letter in key for letter in "<>\n") or len(key) > 200
