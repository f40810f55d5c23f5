"""The fields of a request that are about tools, checked: OpenAI's shape."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from phasewise.serve.failures import ApiError

NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
MOST_TOOLS = 128
CHOICES = ("none", "auto", "required")


def tools(value: Any) -> list[dict[str, Any]]:
    """A list of {"type": "function", "function": {...}}. Raises ValueError."""
    if not isinstance(value, list) or len(value) > MOST_TOOLS:
        raise ValueError(f"must be a list of at most {MOST_TOOLS} functions")
    for i, tool in enumerate(value):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or tool.get("type") != "function":
            raise ValueError(f'{i} must be {{"type": "function", "function": {{...}}}}; other tools are not supported')
        name = function.get("name")
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise ValueError(f"{i}: the name must be 1 to 64 of a-z, A-Z, 0-9, _, - and .")
        if not isinstance(function.get("parameters", {}), dict | None):
            raise ValueError(f"{i}: parameters must be a JSON schema")
        if not isinstance(function.get("strict"), bool | None):
            raise ValueError(f"{i}: strict must be true or false")
    if len(set(names(value))) < len(value):
        raise ValueError("has two functions of one name")
    return value


def names(tools: Sequence[Mapping[str, Any]]) -> list[str]:
    return [tool["function"]["name"] for tool in tools]


def choice(value: Any) -> str | dict[str, Any]:
    """none, auto, required, or {"type": "function", "function": {"name": ...}}. Raises ValueError."""
    if value in CHOICES and isinstance(value, str):
        return value
    function = value.get("function") if isinstance(value, dict) and value.get("type") == "function" else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError('must be none, auto, required, or {"type": "function", "function": {"name": "..."}}')
    return {"function": {"name": function["name"]}}


def forced(tools: Sequence[Mapping[str, Any]], choice: str | Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    """Those tools of which the answer has to call one; none: it need not. Raises ApiError for a choice that these tools
    do not have."""
    if isinstance(choice, Mapping):
        name = str(choice["function"]["name"])
        found = [tool for tool in tools if tool["function"]["name"] == name]
        if not found:
            has = ", ".join(names(tools)) or "none"
            raise ApiError(400, f"tool_choice: there is no tool {name!r}; there are {has}", "tool_choice",
                           "invalid_value")  # fmt: skip
        return found
    if choice != "required":
        return []
    if not tools:
        raise ApiError(400, "tool_choice: required needs tools", "tool_choice", "invalid_value")
    return list(tools)


def strict(tools: Sequence[Mapping[str, Any]]) -> list[str]:
    """Names of the tools whose arguments have to follow their schema."""
    return [tool["function"]["name"] for tool in tools if tool["function"].get("strict")]


def calls(value: Any, i: int) -> list[dict[str, Any]]:
    """`tool_calls` of the i-th message. Raises ValueError."""
    if not isinstance(value, list):
        raise ValueError(f"message {i}: tool_calls must be a list")
    found = []
    for call in value:
        function = call.get("function") if isinstance(call, dict) and call.get("type", "function") == "function" else {}
        function = function if isinstance(function, dict) else {}
        name, arguments = function.get("name"), function.get("arguments")
        if not isinstance(name, str) or not isinstance(arguments, str):
            raise ValueError(f'message {i}: a tool call is {{"id", "type": "function", "function": {{"name", '
                             '"arguments": "JSON text"}}')  # fmt: skip
        if not isinstance(call.get("id"), str):
            raise ValueError(f"message {i}: a tool call needs an id")
        found.append({"id": call["id"], "type": "function", "function": {"name": name, "arguments": arguments}})
    return found


def shaped(messages: Sequence[Mapping[str, Any]], objects: bool) -> list[dict[str, Any]]:
    """Messages as a template wants them: arguments as `objects` where they are such, the tool's name in its result."""
    named: dict[str, str] = {}
    found = []
    for message in messages:
        shaped = dict(message)
        if message.get("tool_calls"):
            shaped["tool_calls"] = [_shaped(call, objects) for call in message["tool_calls"]]
            named |= {call["id"]: call["function"]["name"] for call in message["tool_calls"]}
        if message["role"] == "tool" and "name" not in message and message.get("tool_call_id") in named:
            shaped["name"] = named[message["tool_call_id"]]
        found.append(shaped)
    return found


def _shaped(call: Mapping[str, Any], objects: bool) -> dict[str, Any]:
    function = dict(call["function"])
    if objects:
        try:
            value = json.loads(function["arguments"] or "{}")
        except (ValueError, RecursionError):
            value = None
        if isinstance(value, dict):
            function["arguments"] = value
    return {**call, "function": function}
