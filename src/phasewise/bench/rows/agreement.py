"""Agreement with the same model and default methods, on prompts of a file; and what became of drafts there.

The default's own text is written again, token by token, and what the methods would have taken at each place is
compared: one early difference does not count for all that comes after it. A free run tells where the texts part.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

from phasewise.bench.quality import RowScores, averaged, mean, proportion
from phasewise.bench.rows.subject import Subject
from phasewise.errors import UserError
from phasewise.model.tokenizer import begun

AGREEMENT = "agreement"
WHOLE = f"{AGREEMENT}, default's text"
NEW = 64  # tokens of each text, at most


@dataclass(frozen=True)
class Free:
    """Greedy output of an engine up to its end token: tokens, how many came with each pass, and drafts in all."""

    texts: list[list[int]]
    passes: list[list[int]]
    drafted: int
    accepted: int


Base = Callable[[list[list[int]]], list[list[int]]]
"""The texts of the model with default methods."""
Choices = Callable[[list[list[int]], list[list[int]]], list[list[int]]]
"""After each prompt, for each token of its text: what the methods under test would have taken in its place."""


def read(path: Path) -> list[str]:
    """The first user turn of each conversation of a JSON-lines file: `turns` (a list), or `prompt`.

    Raises UserError naming the line that has neither.
    """
    try:
        lines = path.expanduser().read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--prompts {path}: cannot be read ({error}): give a file of JSON lines") from error
    found = [_first(line, f"{path}:{number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise UserError(f"--prompts {path}: there is no prompt in it")
    return found


def _first(line: str, where: str) -> str:
    try:
        fields: Any = json.loads(line)
    except ValueError as error:
        raise UserError(f"{where}: not JSON ({error})") from error
    if isinstance(fields, dict):
        turns = fields.get("turns")
        text = turns[0] if isinstance(turns, list) and turns else fields.get("prompt")
        if isinstance(text, str) and text:
            return text
    raise UserError(f'{where}: no prompt: write {{"prompt": "..."}} or {{"turns": ["...", ...]}}')


def prompts(subject: Subject, path: Path, rng: Random, examples: int) -> list[list[int]]:
    """Prompts drawn from those of the file that fit the model's context with their text. None is ever cut.

    Raises UserError where there are fewer than `examples` of them.
    """
    every = [subject.ask(text, "") if subject.chats else begun(subject.text.encode(text), subject.text.begin)
             for text in read(path)]  # fmt: skip
    fitting = [ids for ids in every if 0 < len(ids) <= subject.context - NEW]
    if len(fitting) < examples:
        raise UserError(
            f"--prompts {path}: {len(fitting)} of its {len(every)} prompts fit the model's context of "
            f"{subject.context:,} tokens with {NEW} more: ask for at most {len(fitting)} (--examples)"
        )
    return rng.sample(fitting, examples)


def agreement(asked: Sequence[list[int]], base: Base, free: Callable[[list[list[int]]], Free],
              choices: Choices) -> list[RowScores]:  # fmt: skip
    """Share of equal tokens along the default's text; tokens until the texts part; and what became of drafts."""
    texts = base(list(asked))
    same = [share(taken, text) for taken, text in zip(choices(list(asked), texts), texts, strict=True)]
    own = free(list(asked))
    shared = [float(common(mine, text)) for mine, text in zip(own.texts, texts, strict=True)]
    whole = [float(len(text)) for text in texts]
    row = mean(AGREEMENT, "share", same)
    rows = [
        RowScores(replace(row, low=max(0.0, row.low), high=min(1.0, row.high)), same),
        averaged(f"{AGREEMENT}, common beginning", "tokens", shared),
        averaged(WHOLE, "tokens", whole),
    ]
    return rows + (drafts(own) if own.drafted else [])


def drafts(own: Free) -> list[RowScores]:
    """Tokens per pass of the target (the acceptance length), and the share of drafted tokens that were accepted.

    The first token comes with the prompt's pass and is left out. The share's interval takes tokens for independent.
    """
    length = [sum(counts[1:]) / len(counts[1:]) for counts in own.passes if len(counts) > 1]
    rows = [averaged("tokens per pass", "tokens", length)] if length else []
    return [*rows, RowScores(proportion("drafts accepted", own.accepted, own.drafted, "share"), [])]


def share(a: Sequence[int], b: Sequence[int]) -> float:
    """The share of tokens that are equal, place by place."""
    return sum(x == y for x, y in zip(a, b, strict=True)) / len(b)


def common(a: Sequence[int], b: Sequence[int]) -> int:
    """Tokens before the first difference."""
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
