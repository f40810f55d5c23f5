"""The grammar of answers that may be calls: what it allows, format by format, token by token."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer as Backend

from phasewise.methods.sample._grammars import Grammars
from phasewise.methods.sample._words import Words
from phasewise.model.tokenizer import Tokenizer
from phasewise.serve.failures import ApiError
from phasewise.serve.tools.formats import FORMATS
from phasewise.serve.tools.optional import Spelling, grammar
from phasewise.serve.tools.reasoning import TAGS
from tests.serve.playing import checkpoint

pytest.importorskip("llguidance")
TOOLS: Any = [
    {"function": {"name": "weather", "strict": True, "parameters": {
        "type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"],
        "additionalProperties": False}}},
    {"function": {"name": "clock"}},
]  # fmt: skip
HERMES = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
CLOCK = '<tool_call>\n{"name": "clock", "arguments": {"x": [1]}}\n</tool_call>'
MISTRAL = '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Oslo"}}]'
LIST = '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Oslo"}}, {"name": "clock", "arguments": {}}]'
NAMED = '[TOOL_CALLS]weather[ARGS]{"city": "Oslo"}'
LLAMA = '{"name": "weather", "parameters": {"city": "Oslo"}}'
CODER = "<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n</function>\n</tool_call>"
FENCED = '```tool_code\nweather(city="Oslo")\n```'


def wrong(text: str) -> str:
    return text.replace("Oslo", "Bonn")


ALLOWED: dict[str, Sequence[str]] = {
    "hermes": ["", "hello\n", HERMES, f"Hi. {HERMES}\n{CLOCK} bye", "<tool_cal>x"],
    "hermes think": ["", HERMES, "<think", f"<think>a {wrong(HERMES)}</think>{HERMES}", f"\n<think>{wrong(HERMES)}"],
    "hermes opened": [f"a {wrong(HERMES)}</think>{HERMES} b", wrong(HERMES)],
    "mistral": ["", "hi", MISTRAL, f"hi {LIST}", f"{MISTRAL}bye{MISTRAL}", "[TOOL"],
    "mistral mistral": ["", MISTRAL, f"[THINK]{wrong(MISTRAL)[13:]}[/THINK]hi{MISTRAL}"],
    "mistral named": ["hi", NAMED, "[TOOL_CALLS]clock[ARGS]{}"],
    "qwen3_coder": ["", "hi", CODER, f"hi {CODER}\n{CODER} bye"],
    "qwen3_coder think": [f"<think>{wrong(CODER)}</think>{CODER}"],
    "gemma": ["", "a `b`", FENCED, f"Let me see. {FENCED} So.", "```tool_code\nclock(x=[1], y=true)\n```"],
    "llama3": [
        "",
        " hi {",
        LLAMA,
        f"\n{LLAMA}",
        f"{LLAMA}; {LLAMA}",
        f"ok <|python_tag|>{LLAMA}",
        f"<|python_tag|> {LLAMA}",
    ],
}
FORBIDDEN: dict[str, Sequence[str]] = {
    "hermes": [wrong(HERMES), f"a {HERMES}{wrong(HERMES)}", "<tool_call>x", HERMES[:-5]],
    "hermes think": [wrong(HERMES), f"<think>a</think>{wrong(HERMES)}", f"x<think>{wrong(HERMES)}"],
    "hermes opened": [f"a</think>{wrong(HERMES)}"],
    "mistral": [wrong(MISTRAL), wrong(LIST), f"a{MISTRAL}{wrong(MISTRAL)}", "[TOOL_CALLS]x"],
    "mistral mistral": [f"[THINK]a[/THINK]{wrong(MISTRAL)}"],
    "mistral named": [wrong(NAMED), "[TOOL_CALLS]rain[ARGS]{}"],
    "qwen3_coder": [wrong(CODER), f"a {CODER}{wrong(CODER)}", "<tool_call>x", CODER.replace("weather", "rain")],
    "qwen3_coder think": [f"<think>a</think>{wrong(CODER)}"],
    "gemma": [wrong(FENCED), "```tool_code\nweather()\n```", "```tool_code\nprint(1)\n```"],
    "llama3": [wrong(LLAMA), '{"a": 1}', f"{LLAMA} bye", f"<|python_tag|>{wrong(LLAMA)}", f"{LLAMA};{wrong(LLAMA)}"],
}


@cache
def tokenizer() -> Tokenizer:
    """Of which the words of Mistral are special tokens, and no others."""
    return Tokenizer.load(checkpoint("mistral"))


@cache
def grammars() -> Grammars:
    return Grammars(Words(tokenizer(), 322, [2]))


def asked(case: str, special: bool = True) -> dict[str, Any]:
    name, _, how = case.partition(" ")
    format, tags = FORMATS[name], TAGS.get("think" if how == "opened" else how)
    opening = "[TOOL_CALLS]{name}[ARGS]{{" if how == "named" else format.opening
    words = [*format.tokens, *((tags.open, tags.close) if tags else ())]
    ids = {word: i for word in words if (i := tokenizer().id(word)) in tokenizer().special_ids and i is not None}
    return grammar(TOOLS, format, opening, Spelling(ids if special else {}), tags, how == "opened")


def allows(ask: dict[str, Any], ids: Sequence[int]) -> bool:
    """Whether a text is allowed to its end; what is forced on the way must be all that is allowed there."""
    matcher = grammars().get(ask).start()
    mask = np.zeros(grammars().words.width, dtype=np.int32)
    for token in ids:
        sure = matcher.compute_ff_tokens()
        if sure:
            matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            assert int(np.bitwise_count(mask.view(np.uint32)).sum()) == 1
            assert mask[sure[0] >> 5] >> (sure[0] & 31) & 1
        if not matcher.try_consume_tokens([token]):
            return False
    return bool(matcher.is_accepting())


@pytest.mark.parametrize("case", ALLOWED)
def test_what_is_allowed(case: str) -> None:
    ask = asked(case)
    for text in ALLOWED[case]:
        assert allows(ask, tokenizer().encode(text, add_special=False)), text
    for text in FORBIDDEN[case]:
        assert not allows(ask, tokenizer().encode(text, add_special=False)), text


@pytest.mark.parametrize("case", ["mistral", "mistral named"])
def test_a_special_token_may_be_spelled_out_and_begins_a_call_all_the_same(case: str) -> None:
    backend = Backend.from_str(tokenizer().backend.to_str())
    backend.encode_special_tokens = True
    spelled = {text: backend.encode(text, add_special_tokens=False).ids for text in (MISTRAL, wrong(MISTRAL), NAMED)}
    assert all(len(ids) > len(tokenizer().encode(text, add_special=False)) for text, ids in spelled.items())
    assert not allows(asked(case), spelled[wrong(MISTRAL)])
    assert allows(asked("mistral"), spelled[MISTRAL]) and allows(asked("mistral", special=False), spelled[MISTRAL])


def test_a_format_whose_calls_have_no_beginning_of_their_own_is_refused() -> None:
    with pytest.raises(ApiError, match="no beginning of their own"):
        asked("pythonic")


def test_a_schema_cannot_turn_keywords_off() -> None:
    """x-guidance of a tool's parameters is not llguidance's to obey."""
    from phasewise.errors import UserError

    schema = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    tool = {"function": {"name": "f", "strict": True, "parameters": {**schema, "x-guidance": {"lenient": True}}}}
    format = FORMATS["hermes"]
    with pytest.raises(UserError, match="uniqueItems"):
        grammars().get(grammar([tool], format, format.opening, Spelling({}), None, False))
