"""Finds out how a chat template writes tools and reasoning by trying it, never by the model's name.

A conversation with a call is rendered, and the format whose reader finds that call again is the model's own. Where a
template cannot render calls, the format that its text describes is taken.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from typing import Any

from phasewise.errors import UserError
from phasewise.model.chat import ChatTemplate
from phasewise.serve.tools.formats import AUTO, FORMATS, GENERIC, NONE, Format
from phasewise.serve.tools.reader import OutputParser, ParserOptions
from phasewise.serve.tools.reasoning import TAGS, Tags

PROBE, ARGUMENTS = "look_up_the_weather", {"city": "Oslo"}
TOOL = {
    "type": "function",
    "function": {
        "name": PROBE,
        "description": "The weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


@dataclass(frozen=True)
class TemplateTools:
    """`format` of calls, if one is known; `opening`: what a call to {name} begins with; `objects`: the template wants
    arguments as objects, not as text; `tags` around reasoning, if the model reasons."""

    takes_tools: bool = False
    format: Format | None = None
    opening: str = ""
    objects: bool = True
    tags: Tags | None = None


def look(template: ChatTemplate, tool_format: str = AUTO, reasoning_format: str = AUTO) -> TemplateTools:
    """Finds what these templates show. A format named by the user is taken as it is."""
    text = "\n".join(template.sources.values())
    tags = _shown_tags(text) if reasoning_format == AUTO else TAGS.get(reasoning_format)
    if tool_format == GENERIC.name:
        return TemplateTools(True, GENERIC, GENERIC.opening, tags=tags)
    if not template.takes_tools or tool_format == NONE:
        return TemplateTools(template.takes_tools, tags=tags)
    formats = list(FORMATS.values()) if tool_format == AUTO else [FORMATS[tool_format]]
    for objects in (True, False):
        written = _written(template, objects)
        format = next((each for each in formats if _calls(each, written) == [(PROBE, ARGUMENTS)]), None)
        if format is not None:
            return TemplateTools(True, format, _opening(format, written), objects, tags)
    known = next((each for each in formats if tool_format != AUTO or re.search(each.shown, text)), None)
    return TemplateTools(True, known, known.opening if known else "", True, tags)


def _shown_tags(text: str) -> Tags | None:
    """The tags around reasoning that the text of templates has."""
    return next((each for each in TAGS.values() if each.open in text or each.close in text), None)


def _written(template: ChatTemplate, objects: bool) -> str:
    """Renders an answer that is a call; empty if the template cannot."""
    arguments = ARGUMENTS if objects else json.dumps(ARGUMENTS)
    user = {"role": "user", "content": "What is the weather in Oslo?"}
    function = {"name": PROBE, "arguments": arguments}
    call = {"id": "a1B2c3D4e", "type": "function", "function": function}
    answer: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": [call]}
    result = {"role": "tool", "content": "rain", "tool_call_id": call["id"], "name": PROBE}
    render = partial(template.render, tools=[TOOL])
    for after in ((), (result,)):
        try:
            before = render([user])
            whole = render([user, answer, *after], add_generation_prompt=False)
        except UserError:
            continue
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(before, whole)))
        if same < len(before):  # a prompt that opens with more, such as a tag that begins like that of a call
            same = 1 + max(whole.rfind(end, 0, same) for end in ">]\n")
        return whole[same:]
    return ""


def _calls(format: Format, text: str) -> list[tuple[str, Any]]:
    reader = OutputParser(ParserOptions(format, frozenset({PROBE})))
    found: list[list[str]] = []
    for delta in reader.push(text) + reader.finish():
        if delta.kind == "call":
            found.append([delta.text, ""])
        elif delta.kind == "arguments":
            found[-1][1] += delta.text
    try:
        return [(name, json.loads(arguments)) for name, arguments in found]
    except ValueError:
        return []


def _opening(format: Format, written: str) -> str:
    """The template's own way to begin a call, if a reader takes it for the beginning of one; else the format's."""
    if not format.opening.endswith(("{{", "(")):  # it begins with no bracket: a call without arguments has none
        return format.opening
    begun = written[: written.index("city")].rstrip("\"' \n")
    reader = OutputParser(ParserOptions(format, frozenset({PROBE})))
    deltas = reader.push(begun)
    if [delta.kind for delta in deltas if delta.kind != "arguments"] != ["call"]:
        return format.opening
    return begun.replace("{", "{{").replace("}", "}}").replace(PROBE, "{name}")
