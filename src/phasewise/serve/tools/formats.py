"""The formats of tool calls, by name: a module of this folder each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from phasewise.errors import UserError, near
from phasewise.serve.tools import deepseek, gemma, generic, hermes, llama3, mistral, pythonic, qwen3_coder
from phasewise.serve.tools.deltas import DeltaCollector, Steps
from phasewise.serve.tools.reasoning import TAGS
from phasewise.serve.tools.scan import KnownTools
from phasewise.serve.tools.spelling import Spelling

Held = Callable[[str, Mapping[str, Any], str, Spelling], list[str]]


@dataclass(frozen=True)
class Format:
    """`read` is the reader of an answer with calls, `opening` what a call to {name} begins with, and `closing` what
    comes after it; `trigger` begins calls wherever it stands ("": nothing does), and in a format of `whole` answers so
    does a brace where the answer begins; `held` gives the rules of a call in a grammar. `shown` finds the format in the
    text of a template, and `tokens` are its words, which a tokenizer may hold to be special."""

    name: str
    read: Callable[[DeltaCollector, KnownTools], Steps]
    opening: str
    closing: str
    trigger: str
    whole: bool
    held: Held
    shown: str
    tokens: tuple[str, ...]


FORMATS = {
    name: Format(
        name,
        module.read,
        module.OPENING,
        module.CLOSING,
        module.TRIGGER,
        module.WHOLE,
        module.HELD,
        module.SHOWN,
        module.TOKENS,
    )
    for name, module in (
        ("qwen3_coder", qwen3_coder),
        ("hermes", hermes),
        ("deepseek", deepseek),
        ("llama3", llama3),
        ("mistral", mistral),
        ("gemma", gemma),
        ("pythonic", pythonic),
    )
}
AUTO, NONE = "auto", "none"
GENERIC = replace(FORMATS["hermes"], name=generic.NAME)  # chosen by name alone: no template describes it
TOOL_FORMATS = (AUTO, NONE, generic.NAME, *FORMATS)
REASONING_FORMATS = (AUTO, NONE, *TAGS)


def check(tool_format: str, reasoning_format: str) -> None:
    """Raise UserError for a name that is none of these."""
    for option, name, names in (
        ("--tool-format", tool_format, TOOL_FORMATS),
        ("--reasoning-format", reasoning_format, REASONING_FORMATS),
    ):
        if name not in names:
            raise UserError(f"{option} {name!r} is not known. {near(name, names)}")
