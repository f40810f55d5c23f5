"""Arguments that are no JSON object, but written one by one: what a schema says of each."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from phasewise.serve.tools.calls import of_object, refused

ABOUT = {"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment", "$schema",
         "$id"}  # fmt: skip
DEFINITIONS = ("$defs", "definitions")
OBJECT = {"type", "properties", "required", "additionalProperties", "unevaluatedProperties", *DEFINITIONS, *ABOUT}


@dataclass(frozen=True)
class ToolArgument:
    """One argument: its name, what its schema says, with the definitions that it may refer to, and whether it must be
    there."""

    key: str
    schema: dict[str, Any]
    required: bool


def members(function: Mapping[str, Any]) -> list[ToolArgument]:
    """The arguments of a function in the order of its schema; others, which it may allow, are left out. Raises ApiError
    naming a keyword that is not honoured."""
    schema = of_object(function)
    only(function, schema, OBJECT)
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(properties, dict) or not isinstance(required, list):
        raise refused(function, "properties or required of a wrong type")
    shared = {name: schema[name] for name in DEFINITIONS if name in schema}
    found = []
    for key in dict.fromkeys([*properties, *map(str, required)]):
        own = properties.get(key, True)
        if not isinstance(own, dict | bool) or own is False:
            raise refused(function, f"{json.dumps(own)} for {key}")
        found.append(ToolArgument(key, {**({} if own is True else own), **(shared if own not in (True, {}) else {})},
                            key in required))  # fmt: skip
    return found


def only(function: Mapping[str, Any], schema: Mapping[str, Any], known: Iterable[str]) -> None:
    """Raise ApiError naming a keyword of a schema that is none of these."""
    other = next((word for word in schema if word not in known), None)
    if other is not None:
        raise refused(function, f"{other} where this model's format writes no JSON")
