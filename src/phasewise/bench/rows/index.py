"""All rows by name: which suit a model, and what keeps one from being measured."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from random import Random

from phasewise.bench import harder, quality
from phasewise.bench.quality import RowScores
from phasewise.bench.rows.agreement import AGREEMENT
from phasewise.bench.rows.calls import ROWS as CALLS
from phasewise.bench.rows.english import FURTHER, LENGTHS, ROOM, passkey
from phasewise.bench.rows.later import ROWS as LATER
from phasewise.bench.rows.longtext import WINDOWS, library, long_loss
from phasewise.bench.rows.subject import Subject
from phasewise.errors import UserError, near
from phasewise.model.tokenizer import Tokenizer
from phasewise.train.tokenizer import BEGIN, SPECIAL

GENERAL = (*WINDOWS, *LENGTHS)
EVERY = (*quality.ALL, *harder.ROWS, *LATER, *CALLS, *GENERAL, AGREEMENT)
LIBRARY = (quality.CODE_LOSS, quality.NEXT_LINE)  # rows of its source, as some of WINDOWS are


def known(names: list[str], prompts: Path | None) -> None:
    """Raise UserError for a row that does not exist, and for one that lacks what it needs."""
    for name in names:
        if name not in EVERY:
            raise UserError(f"unknown task {name!r}. {near(name, EVERY)}")
    if AGREEMENT in names and prompts is None:
        raise UserError(f"{AGREEMENT} needs prompts: give --prompts FILE, JSON lines with `turns` or `prompt`")


def tokens(name: str) -> int:
    """The context that a row of a fixed length needs; 0 for the others."""
    if name in WINDOWS:
        return WINDOWS[name].length
    return LENGTHS[name] + ROOM if name in LENGTHS else 0


def text(name: str, prompts: Path | None) -> str | None:
    """Identifies the text that a row's examples are taken from: a digest of the library of the Python that runs, or of
    the file of prompts. None where they are made here, of the seed alone."""
    if name == AGREEMENT and prompts is not None:
        return _digest(prompts.expanduser().read_bytes())
    if name in LIBRARY:
        return _of(library)
    return _of(WINDOWS[name].source) if name in WINDOWS else None


@cache
def _of(source: Callable[[], str]) -> str:
    return _digest(source().encode())


def _digest(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()[:16]


def trained_for_tasks(tokenizer: Tokenizer) -> bool:
    """True for the tokenizer of a model that learned the generated tasks, as the pocket model has."""
    return all(tokenizer.id(token) == i for i, token in enumerate(SPECIAL) if token != BEGIN)


def suited(tokenizer: Tokenizer, context: int, prompts: Path | None) -> tuple[list[str], list[str]]:
    """The rows that tell something about a model, and those that would but for the length of its context."""
    general = [name for name in GENERAL if name not in FURTHER]
    wanted = [*quality.ALL, *LATER] if trained_for_tasks(tokenizer) else general
    if prompts is not None:
        wanted.append(AGREEMENT)
    return [name for name in wanted if tokens(name) <= context], [name for name in wanted if tokens(name) > context]


def fits(name: str, context: int) -> None:
    """Raise UserError where a row is longer than the model's context: it is not cut."""
    if tokens(name) > context:
        shorter = [other for other in GENERAL if other.split("@")[0] == name.split("@")[0] and tokens(other) <= context]
        instead = f"measure {', '.join(shorter)}" if shorter else "leave it out"
        raise UserError(f"{name} needs a context of {tokens(name):,} tokens, the model's is {context:,}: {instead}")


def general(name: str, subject: Subject, examples: int, seed: int) -> list[RowScores]:
    """Measure a row of GENERAL on `examples` examples drawn with `seed`. Raises UserError where it does not fit."""
    fits(name, subject.context)
    rng = Random(f"{seed} {name}")
    if name in WINDOWS:
        return long_loss(name, WINDOWS[name], subject, rng, examples)
    return [passkey(name, subject, rng, examples)]
