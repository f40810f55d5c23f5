"""Loss on long windows of text that the pocket model was not trained on: library source, and prose about Python.

Both are on every machine that has Python, and belong to its version: figures of two versions are not comparable. In
each window the end of every quarter is scored: what comes before such a stretch is a prompt, the stretch itself is
decoded, so that methods of both phases count, at every length up to the window's.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from random import Random

from phasewise.bench.forced import STRETCH
from phasewise.bench.quality import RowScores, averaged, per_byte
from phasewise.bench.rows.subject import Subject
from phasewise.errors import UserError
from phasewise.known.corpus import sources
from phasewise.model.tokenizer import begun

QUARTERS = 4
TRAINED_ON = ("debugger",)  # topics whose text is in a library file too, one that is not held out


def library() -> str:
    """The held-out part of the standard library's source."""
    return "\n\n".join(sources(held_out=True).values())


def chapters() -> list[str]:
    """The chapters of the language reference that `help()` shows, by name; those that are docstrings too left out."""
    topics: dict[str, str] = import_module("pydoc_data.topics").topics
    return [topics[name] for name in sorted(topics) if name not in TRAINED_ON]


def prose() -> str:
    """All chapters in a row."""
    return "\n\n".join(chapters())


@dataclass(frozen=True)
class TextWindow:
    """The source of a row's text, and the number of tokens of it that are read at once."""

    source: Callable[[], str]
    length: int

    @property
    def stretches(self) -> list[range]:
        """The stretches that are scored: the last tokens of each quarter."""
        ends = [self.length * i // QUARTERS for i in range(1, QUARTERS + 1)]
        size = min(STRETCH, self.length // (2 * QUARTERS))
        return [range(end - size, end) for end in ends]


TEXTS = {"code": library, "docs": prose}
WINDOWS = {f"{name}@{k}k": TextWindow(text, k * 1024) for name, text in TEXTS.items() for k in (2, 4, 8)}


def long_loss(name: str, window: TextWindow, subject: Subject, rng: Random, examples: int) -> list[RowScores]:
    """The loss on windows spread evenly over the text, per token and per byte, and in the windows' last stretches.

    Raises UserError where the text is no longer than a window.
    """
    ids, own = subject.text.encode(window.source()), window.length - len(subject.text.begin)
    if len(ids) <= own:
        raise UserError(f"{name}: the text has {len(ids)} tokens, too few for windows of {window.length}")
    nats, bits, last = [], [], []
    for number in range(examples):
        start = int((number + rng.random()) / examples * (len(ids) - own))
        tokens = begun(ids[start : start + own], subject.text.begin)
        found = subject.losses(tokens, window.stretches)
        nats.append(statistics.fmean(found))
        bits.append(per_byte(nats[-1], subject.text, [tokens[at] for stretch in window.stretches for at in stretch]))
        last.append(found[-1])
    return [
        averaged(name, "nats/token", nats),
        averaged(name, "bits/byte", bits),
        averaged(f"{name}, its end", "nats/token", last),
    ]
