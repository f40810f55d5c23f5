"""The readers of tool calls and reasoning: any cut gives the same, which a slow twin finds in the whole text."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from phasewise.errors import UserError
from phasewise.serve.tools.deltas import OutputDelta, joined
from phasewise.serve.tools.formats import FORMATS, check
from phasewise.serve.tools.reader import OutputParser, ParserOptions
from phasewise.serve.tools.reasoning import TAGS
from tests.serve.tools import whole

TOOLS = frozenset({"f", "look_up"})
PIECES = [
    "<tool_call>", "</tool_call>", "<tool_", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]",
    "<|python_start|>", "<|python_end|>", "<think>", "</think>", "<", "[", "]", "{", "}", "(", ")", '"', "'", "\\",
    ":", ",", ";", "=", " ", "\n", "f", "look_up", "other", "x", "é", "1", "-2.5e3", "true", "None", "f(", "x=",
    '"f"', '"x": ', '"name": ', '"type": ', '"arguments": ', '"parameters": {', "f{", "f[ARGS]{",
    '{"name": "f", "arguments": {', '{"name": "f", "parameters": {', '{"name": "look_up", "arguments": {"x": 1}}',
    '{"arguments": {"y": "\\"}"}, "name": "f"}', '{"name": "f"}', "[f(x=1)", '{"name": "other", "arguments": {}}',
    '{"name": "f", "arguments": "{}"}', '{"id": "a", "name": "f", "arguments": {', '"}}', "}}", "}}</tool_call>",
    "<function=f>", "<function=", "<parameter=x>", "<parameter=y>\n", "\n</parameter>", "</parameter>", "</function>",
    "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "function", "<｜tool▁sep｜>", "```json\n", "```",
    "f<｜tool▁sep｜>{", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>", "<tool_call>{", "Sure. ",
    "[f(", "\\u00e9", "look_up()]", "```tool_code\n", "print(", "f(x=1))",
]  # fmt: skip
SOUP = st.lists(st.sampled_from(PIECES) | st.text(max_size=3), max_size=14).map("".join)
STARTS = st.sampled_from(
    [
        "",
        "<tool_call>",
        "<tool_call>\n<function=f>\n<parameter=x>\n",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>",
        "[TOOL_CALLS] [",
        '{"name": "f", "parameters": {"x": ',
        "<|python_tag|>",
        "[f(",
        "```tool_code\n",
        "```tool_code\nprint(f(x=",
    ]
)
NAMES = sorted(FORMATS)


def manner(name: str, **options: Any) -> ParserOptions:
    return ParserOptions(FORMATS.get(name), TOOLS, **options)


def read(how: ParserOptions, *pieces: str) -> list[OutputDelta]:
    reader = OutputParser(how)
    return joined([delta for piece in pieces for delta in reader.push(piece)] + reader.finish())


def items(deltas: list[OutputDelta]) -> list[tuple[str, ...]]:
    """In the twin's words."""
    found: list[tuple[str, ...]] = []
    for delta in deltas:
        if delta.kind == "call":
            found.append(("call", delta.text, ""))
        elif delta.kind == "arguments":
            assert delta.index == sum(item[0] == "call" for item in found) - 1
            found[-1] = ("call", found[-1][1], found[-1][2] + delta.text)
        else:
            found.append(("text", delta.text))
    return found


@pytest.mark.parametrize("name", sorted(whole.READERS))
@given(start=STARTS, soup=SOUP)
@settings(max_examples=200, deadline=None)
def test_the_whole_text_tells_the_same(name: str, start: str, soup: str) -> None:
    text = start + soup
    assert items(read(manner(name), text)) == whole.tidy(whole.READERS[name](text, set(TOOLS)))


@pytest.mark.parametrize("name", [*NAMES, "none"])
@given(start=STARTS, soup=SOUP, cuts=st.lists(st.integers(0, 80)), opened=st.booleans(), split=st.booleans())
@settings(max_examples=20, deadline=None)
def test_cuts_do_not_matter(name: str, start: str, soup: str, cuts: list[int], opened: bool, split: bool) -> None:
    text = start + soup
    how = manner(name, tags=TAGS["think"] if split else None, opened=opened)
    ends = sorted({0, *cuts, len(text)})
    pieces = [text[a:b] for a, b in pairwise(ends)]
    assert read(how, *pieces) == read(how, text) == read(how, *text)


@pytest.mark.parametrize("name", NAMES)
@given(start=STARTS, soup=SOUP)
@settings(max_examples=200, deadline=None)
def test_what_is_no_call_is_content_to_the_letter(name: str, start: str, soup: str) -> None:
    found = read(ParserOptions(FORMATS[name], frozenset()), start + soup)
    assert "".join(delta.text for delta in found) == start + soup
    assert {delta.kind for delta in found} <= {"content"}


@pytest.mark.parametrize("name", NAMES)
@given(parts=st.lists(st.sampled_from(PIECES), max_size=12), start=STARTS)
@settings(max_examples=20, deadline=None)
def test_no_word_is_lost(name: str, parts: list[str], start: str) -> None:
    """Words that stand outside of objects of calls are said, whatever goes wrong around them."""
    words = [f"w{i}w" for i in range(len(parts))]
    text = start + "".join(part + word for part, word in zip(parts, words))
    said = "".join(delta.text for delta in read(manner(name), text))
    ends = [m.start() for m in re.finditer(r"w\d+w", said)]
    missing = [word for word in words if word not in said]
    assert len(ends) + len(missing) >= len(words)
    for word in missing:  # only where an object still has something to say after its arguments
        assert name not in ("pythonic", "gemma") and re.search(
            r'"(?:arguments|parameters)": (?:\{|")', text.partition(word)[0]
        )


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
ARGUMENTS = st.dictionaries(st.from_regex(r"[a-z_][a-z0-9_]{0,5}", fullmatch=True), VALUES, max_size=3)
CALLS = st.lists(st.tuples(st.sampled_from(sorted(TOOLS)), ARGUMENTS), min_size=1, max_size=3)


def said(name: str, calls: list[tuple[str, dict[str, Any]]], ascii_: bool) -> str:
    key = "parameters" if name == "llama3" else "arguments"
    objects = [json.dumps({"name": f, key: arguments}, ensure_ascii=ascii_) for f, arguments in calls]
    pythons = [f"{f}({', '.join(f'{k}={v!r}' for k, v in arguments.items())})" for f, arguments in calls]
    fenced = [f"function<｜tool▁sep｜>{f}\n```json\n{json.dumps(arguments)}\n```" for f, arguments in calls]
    values = [[(k, v if isinstance(v, str) else json.dumps(v)) for k, v in arguments.items()] for _, arguments in calls]
    tags = ["".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in each) for each in values]
    tagged = [f"<function={f}>\n{each}</function>" for (f, _), each in zip(calls, tags)]
    return {
        "deepseek": "<｜tool▁calls▁begin｜>"
        + "\n".join(f"<｜tool▁call▁begin｜>{each}<｜tool▁call▁end｜>" for each in fenced)
        + "<｜tool▁calls▁end｜>",
        "qwen3_coder": "\n".join(f"<tool_call>\n{each}\n</tool_call>" for each in tagged),
        "hermes": "\n".join(f"<tool_call>\n{each}\n</tool_call>" for each in objects),
        "llama3": "; ".join(objects),
        "mistral": f"[TOOL_CALLS] [{', '.join(objects)}]",
        "pythonic": f"[{', '.join(pythons)}]",
        "gemma": "\n".join(["```tool_code", *pythons, "```"]),
    }[name]


@pytest.mark.parametrize("name", NAMES)
@given(calls=CALLS, ascii_=st.booleans())
@settings(max_examples=150, deadline=None)
def test_calls_come_back(name: str, calls: list[tuple[str, dict[str, Any]]], ascii_: bool) -> None:
    if name == "qwen3_coder":  # a schema says which values are text, so there is one call of each tool
        calls = list(dict(calls).items())
        assume(not any("</parameter>" in value for _, own in calls for value in own.values() if isinstance(value, str)))
    typed = {f: {"properties": {key: {"type": "string" if isinstance(value, str) else "object"}
                 for key, value in own.items()}} for f, own in calls}  # fmt: skip
    found = items(read(manner(name, schemas=typed), said(name, calls, ascii_)))
    assert [(item[0], item[1]) for item in found] == [("call", f) for f, _ in calls]
    assert [json.loads(item[2]) for item in found] == [arguments for _, arguments in calls]


@pytest.mark.parametrize("name", NAMES)
def test_the_name_comes_at_once_and_arguments_as_they_are_written(name: str) -> None:
    text = said(name, [("f", {"x": "abcdefgh", "y": [1, 2]})], False)
    reader = OutputParser(manner(name))
    kinds = [{delta.kind for delta in reader.push(c)} for c in text]
    named = next(i for i, each in enumerate(kinds) if "call" in each)
    assert named <= text.index("abc") and sum("call" in each for each in kinds) == 1
    assert all("arguments" in each for each in kinds[text.index("abc") : text.index("fgh")])


def test_newer_templates_of_mistral_name_the_call_before_its_arguments() -> None:
    text = 'Hm.[TOOL_CALLS]f[ARGS]{"x": 1}[TOOL_CALLS]look_up[CALL_ID]a1b[ARGS]{}'
    assert items(read(manner("mistral"), text)) == [
        ("text", "Hm."),
        ("call", "f", '{"x": 1}'),
        ("call", "look_up", "{}"),
    ]


def test_deepseek_names_the_call_at_once_since_3_1() -> None:
    text = 'Hm.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"x": 1}<｜tool▁call▁end｜>'
    text += "<｜tool▁call▁begin｜>look_up<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    expected = [("text", "Hm."), ("call", "f", '{"x": 1}'), ("call", "look_up", "{}")]
    assert items(read(manner("deepseek"), text)) == items(read(manner("deepseek"), *text)) == expected


@pytest.mark.parametrize(
    ("schema", "value", "expected"),
    [
        ({"type": "string"}, "12", '"12"'), ({"type": "string"}, '\n "a"\n', '"\\n \\"a\\"\\n"'), ({}, "12", '"12"'),
        ({"type": "integer"}, "12", "12"), ({"type": "integer"}, "twelve", '"twelve"'),
        ({"type": "number"}, "NaN", '"NaN"'), ({"type": "boolean"}, "True", "true"),
        ({"type": "object"}, "None", "null"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "Oslo", '"Oslo"'),
        ({"type": ["array", "null"]}, '[1, "</x>"]', '[1, "</x>"]'), ({"enum": ["1", "2"]}, "1", '"1"'),
        ({"enum": [1, 2]}, "1", "1"), ({"const": "1"}, "1", '"1"'), (3, "1", '"1"'),
    ],
)  # fmt: skip
def test_values_between_tags_are_what_their_schema_says(schema: Any, value: str, expected: str) -> None:
    how = manner("qwen3_coder", schemas={"f": {"properties": {"x": schema}}})
    text = f"So:\n<tool_call>\n<function=f>\n<parameter=x>\n{value}\n</parameter>\n</function>\n</tool_call>"
    assert items(read(how, text)) == [("text", "So:"), ("call", "f", f'{{"x": {expected}}}')]


def test_python_is_told_as_json() -> None:
    text = r"""<|python_start|>[f(a='it\'s "x"\n\x41', b=(1, -.5, 0x1F,), c={'k': None}), look_up()]<|python_end|>"""
    first, second = items(read(manner("pythonic"), text))
    assert json.loads(first[2]) == {"a": 'it\'s "x"\nA', "b": [1, -0.5, 31], "c": {"k": None}}
    assert second == ("call", "look_up", "{}")


@pytest.mark.parametrize(
    "inside",
    [
        "f(x='a')\nlook_up(y=[1])",
        'print(f(x="a"))\nprint( look_up(y=[1]) )',
        "[f(x='a'), look_up(y=[1])]",
        "[f(x='a'), look_up(y=[1],),\n]",
        "f(x='a'); look_up(y=(1,))",
        "[print(f(x='a'))] look_up(y=[1])",
    ],
)
def test_a_fence_of_tool_code_has_calls_in_several_manners(inside: str) -> None:
    text = f"Let me see.\n```tool_code\n{inside}\n```\nSo:\n```tool_code\nf()```"
    expected = [("text", "Let me see."), ("call", "f", '{"x": "a"}'), ("call", "look_up", '{"y": [1]}'),
                ("text", "So:"), ("call", "f", "{}")]  # fmt: skip
    assert items(read(manner("gemma"), text)) == items(read(manner("gemma"), *text)) == expected


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("hermes", '<tool_call>{"name": "other", "arguments": {}}</tool_call>', None),
        ("hermes", "<tool_call>f</tool_call>", None),
        ("hermes", '<tool_call>{"name": "f", "arguments": 3}</tool_call>', None),
        ("hermes", '<tool_call>{"name": "f", "argu', None),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"x": 1</tool_call>.',
         [("call", "f", '{"x": 1'), ("text", ".")]),
        ("llama3", '{"answer": {"name": "f", "parameters": {}}}', None),
        ("llama3", '<|python_tag|>f.call(query="x")', None),
        ("mistral", "[TOOL_CALLS] []", None),
        ("mistral", '[TOOL_CALLS]{"name": "f", "arguments": {}} bye', [("call", "f", "{}"), ("text", "bye")]),
        ("qwen3_coder", "<tool_call>\n<function=other>\n</function>\n</tool_call>", None),
        ("qwen3_coder", "<tool_call>\n<functional>", None),
        ("qwen3_coder", "a <function=f", None),
        ("qwen3_coder", "<function=f></function> bye", [("call", "f", "{}"), ("text", "bye")]),
        ("qwen3_coder", "<function=f><parameter=x>1", [("call", "f", '{"x": "1')]),
        ("qwen3_coder", "<function=f> so", [("call", "f", "{"), ("text", "so")]),
        ("deepseek", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>other<｜tool▁sep｜>{}", None),
        ("deepseek", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```js", None),
        ("deepseek", "<｜tool▁calls▁end｜>", None),
        ("gemma", "```tool_code\nother()\n```", None),
        ("gemma", "```tool_code\nprint(x)\n```", None),
        ("gemma", "```tool_code\n[f", None),
        ("gemma", "f(x=1)", None),
        ("gemma", "```tool_code\n```", None),
        ("gemma", "```tool_code\nf(x=1", [("call", "f", '{"x": 1')]),
        ("gemma", "```tool_code\nf(x=1)\nother()\n```", [("call", "f", '{"x": 1}'), ("text", "other()\n```")]),
        ("gemma", "```tool_code\nf()\n``` bye", [("call", "f", "{}"), ("text", "bye")]),
        ("pythonic", "[f](x)", None),
        ("pythonic", "[other(x=1)]", None),
        ("pythonic", "[f(x=1, 5)] so", [("call", "f", '{"x": 1'), ("text", "5)] so")]),
        ("pythonic", "[f(x=nan)]", [("call", "f", '{"x": nan'), ("text", ")]")]),
        ("pythonic", "[f(x=" + "[" * 100, [("call", "f", '{"x": ' + "[" * 64), ("text", "[" * 36)]),
        ("pythonic", "[f(x=0x" + "f" * 390 + ")]", [("call", "f", '{"x": ' + str(16**390 - 1) + "}")]),
    ],
)  # fmt: skip
def test_what_goes_wrong(name: str, text: str, expected: list[tuple[str, ...]] | None) -> None:
    assert items(read(manner(name), text)) == ([("text", text)] if expected is None else expected)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("deep", ["[", '{"x":', "<tool_call>", '{"name": "f", "arguments": {', "[f(x="])
def test_depth_and_length_break_nothing(name: str, deep: str) -> None:
    found = read(manner(name), deep * 1000)
    assert sum(len(delta.text) for delta in found) > 1000 * len(deep) // 8


@pytest.mark.parametrize(
    ("text", "opened", "expected"),
    [
        ("<think>\nhm\n</think>\n\nSo.", False, [("reasoning", "hm"), ("content", "So.")]),
        ("hm</think>So.", True, [("reasoning", "hm"), ("content", "So.")]),
        ("\n<think>hm", False, [("reasoning", "hm")]),
        ("hm <think> x</think>", False, [("content", "hm <think> x</think>")]),
        ("<thin", False, [("content", "<thin")]),
        ("<think></think>So.", False, [("content", "So.")]),
        ("<think>a</thin</think> b ", False, [("reasoning", "a</thin"), ("content", "b ")]),
        ('<think>a</think>\n<tool_call>{"name": "f"}</tool_call>', False,
         [("reasoning", "a"), ("call", "f"), ("arguments", "{}")]),
    ],
)  # fmt: skip
def test_reasoning(text: str, opened: bool, expected: list[tuple[str, str]]) -> None:
    found = read(manner("hermes", tags=TAGS["think"], opened=opened), text)
    assert [(delta.kind, delta.text) for delta in found] == expected


def test_with_a_single_call_the_answer_ends_with_it() -> None:
    reader = OutputParser(manner("hermes", single=True))
    text = said("hermes", [("f", {"x": {}}), ("look_up", {})], False)
    found = []
    for c in text:
        found += reader.push(c)
        assert reader.done == (len(found) > 0 and "".join(d.text for d in found) == 'f{"x": {}}')
    assert items(joined(found + reader.finish())) == [("call", "f", '{"x": {}}')]


def test_unknown_names_have_near_matches() -> None:
    check("auto", "none")
    with pytest.raises(UserError, match="hermes"):
        check("herms", "auto")
    with pytest.raises(UserError, match="think"):
        check("auto", "thnk")
