"""What templates show: the format of calls is found by trying, and its opening is the template's own."""

from __future__ import annotations

import json

import pytest

from phasewise.model.chat import ChatTemplate
from phasewise.serve.tools.asked import shaped
from phasewise.serve.tools.reader import OutputParser, ParserOptions
from phasewise.serve.tools.reasoning import TAGS
from phasewise.serve.tools.template import TemplateTools, look
from tests.serve.playing import TEMPLATES
from tests.serve.tiny_chat import TEMPLATE


def seen(name: str, tool_format: str = "auto", reasoning_format: str = "auto") -> TemplateTools:
    return look(ChatTemplate({"default": TEMPLATES[name]}), tool_format, reasoning_format)


@pytest.mark.parametrize(
    ("name", "format", "opening"),
    [
        ("hermes", "hermes", '<tool_call>\n{{"name": "{name}", "arguments": {{'),
        ("llama3", "llama3", '{{"name": "{name}", "parameters": {{'),
        ("mistral", "mistral", '[TOOL_CALLS] [{{"name": "{name}", "arguments": {{'),
        ("named", "mistral", "[TOOL_CALLS]{name}[ARGS]{{"),
        ("pythonic", "pythonic", "[{name}("),
        ("coder", "qwen3_coder", "<tool_call>\n<function={name}>\n"),
        ("fenced", "deepseek", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{{"),
        ("separated", "deepseek", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{{"),
        ("tool_code", "gemma", "```tool_code\nprint({name}("),
        ("described", "hermes", '<tool_call>\n{{"name": "{name}", "arguments": {{'),
    ],
)
def test_the_format_is_found(name: str, format: str, opening: str) -> None:
    shown = seen(name)
    assert shown.format is not None
    assert (shown.format.name, shown.opening, shown.tags) == (format, opening, None)
    assert shown.objects == (name not in ("named", "fenced")), (
        "this template writes arguments as they are: it wants text"
    )
    reader = OutputParser(ParserOptions(shown.format, frozenset({"f"})))
    assert [delta.text for delta in reader.push(shown.opening.format(name="f")) if delta.kind == "call"] == ["f"]


def test_a_prompt_that_opens_reasoning_hides_no_call() -> None:
    shown = seen("opened")
    assert shown.format is not None and shown.tags == TAGS["think"]
    assert (shown.format.name, shown.opening) == ("hermes", '<tool_call>\n{{"name": "{name}", "arguments": {{')


def test_tools_that_a_template_may_set_itself_are_still_taken() -> None:
    shown = seen("branches")
    assert shown.takes_tools and shown.format is not None and shown.format.name == "llama3"


def test_what_is_not_there_is_not_found() -> None:
    assert seen("unknown").takes_tools and seen("unknown").format is None
    assert look(ChatTemplate({"default": TEMPLATE})) == TemplateTools()
    assert look(ChatTemplate({})) == TemplateTools()


def test_names_are_taken_for_what_they_are() -> None:
    assert seen("hermes", "none").format is None and seen("hermes", "none").takes_tools
    forced = seen("unknown", "pythonic")
    assert forced.format is not None and forced.opening == "[{name}("
    assert seen("thinking").tags == TAGS["think"] and seen("thinking", "auto", "none").tags is None
    assert seen("hermes", "auto", "mistral").tags == TAGS["mistral"]


def test_a_template_of_its_own_for_tools() -> None:
    both = ChatTemplate({"default": TEMPLATE, "tool_use": TEMPLATES["llama3"]})
    found = look(both)
    assert found.format is not None and found.format.name == "llama3"


def test_messages_are_shaped_for_the_template() -> None:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x": [1]}'}}
    broken = {"id": "b", "type": "function", "function": {"name": "g", "arguments": '{"x": '}}
    messages = [
        {"role": "assistant", "content": "", "tool_calls": [call, broken]},
        {"role": "tool", "content": "ok", "tool_call_id": "b"},
    ]
    first, second = shaped(messages, objects=True)
    assert [each["function"]["arguments"] for each in first["tool_calls"]] == [{"x": [1]}, '{"x": ']
    assert second["name"] == "g"
    assert shaped(messages, objects=False)[0]["tool_calls"] == [call, broken]
    assert json.loads(call["function"]["arguments"]) == {"x": [1]}, "what was sent is not changed"
