"""Tools for models whose chat template shows none: a system message lists them, and says how one is called.

Calls are written as in the format `hermes`, which many models have met. In the history they are text of the assistant,
and results are text of the user, for such a template knows no other roles.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from phasewise.errors import UserError
from phasewise.serve.tools.hermes import CLOSE, OPEN

NAME = "generic"
RESULT, END = "<tool_response>", "</tool_response>"
HOW = f"""You can call functions. Each line between <tools> and </tools> describes one, as JSON with a schema of its \
arguments:
<tools>
%s
</tools>
To call a function, write its name and its arguments as JSON between {OPEN} and {CLOSE}:
{OPEN}
{{"name": "NAME", "arguments": {{"ARGUMENT": "VALUE"}}}}
{CLOSE}
Results come between {RESULT} and {END}. Answer in plain text where no function is needed."""
Messages = list[dict[str, Any]]


def render(
    write: Callable[[Messages], str], messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> str:
    """The prompt that a template writes of a conversation with tools. A template that takes no system message is given
    the list of tools with the first message of the user. Raises UserError."""
    plain = spelled(messages)
    if not tools:
        return write(plain)
    text = HOW % "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    try:
        return write(_joined(plain, text, "system"))
    except UserError:
        if any(message["role"] == "system" for message in plain):
            raise
        return write(_joined(plain, text, "user"))


def spelled(messages: Sequence[Mapping[str, Any]]) -> Messages:
    """The same without calls and results of tools, which become text. Results in a row are one message."""
    found: Messages = []
    for message in messages:
        if message["role"] == "tool":
            text = f"{RESULT}\n{_text(message['content'])}\n{END}"
            if found and found[-1].get("results"):
                found[-1]["content"] += f"\n{text}"
            else:
                found.append({"role": "user", "content": text, "results": True})
            continue
        calls = "\n".join(_call(call["function"]) for call in message.get("tool_calls") or ())
        shown = {key: value for key, value in message.items() if key != "tool_calls"}
        if calls:
            before = _text(message.get("content") or "")
            shown["content"] = f"{before}\n{calls}" if before else calls
        found.append(shown)
    return [{key: value for key, value in message.items() if key != "results"} for message in found]


def _call(function: Mapping[str, Any]) -> str:
    """A call as the model is to write it; arguments that are no JSON stay as they were written."""
    try:
        arguments = json.dumps(json.loads(function["arguments"] or "{}"), ensure_ascii=False)
    except (ValueError, RecursionError):
        arguments = str(function["arguments"])
    return f'{OPEN}\n{{"name": {json.dumps(function["name"])}, "arguments": {arguments}}}\n{CLOSE}'


def _joined(messages: Messages, text: str, role: str) -> Messages:
    """With a text in front of the first message of this role; as a message of its own where there is none."""
    for i, message in enumerate(messages):
        if message["role"] == role:
            own = _text(message["content"])
            parts = (own, text) if role == "system" else (text, own)
            return [*messages[:i], {**message, "content": "\n\n".join(parts)}, *messages[i + 1 :]]
    return [{"role": role, "content": text}, *messages]


def _text(content: Any) -> str:
    """A message's content, which may be in parts."""
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)
