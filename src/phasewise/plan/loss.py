"""The accuracy that a recipe loses against the default, on the same examples: paired, with 95 % intervals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from phasewise.bench.judge import Judge
from phasewise.bench.quality import PERCENT, RowScores
from phasewise.bench.stats import means, shares
from phasewise.errors import UserError
from phasewise.llm import LLM


@dataclass(frozen=True)
class Loss:
    """The share of what the default has that is lost: of right answers, in points; of nats per token, how many more
    there are, over the default's own."""

    task: str
    mean: float
    low: float
    high: float
    n: int

    def __str__(self) -> str:
        return f"{self.mean:+.1%} [{self.low:+.1%}, {self.high:+.1%}]"


def lost(task: str, base: RowScores, own: RowScores) -> Loss:
    if base.row.unit in PERCENT:
        found, scale = shares(base.values, own.values), 1.0
    else:
        found, scale = means(own.values, base.values), base.row.value
    return Loss(task, found.mean / scale, found.low / scale, found.high / scale, found.n)


class Scales:
    """Measures recipes against the default on rows of `phasewise eval`; what the default comes to is measured once."""

    def __init__(self, llm: LLM, tasks: Sequence[str], shared: Mapping[str, str]) -> None:
        self.llm, self.tasks, self.shared = llm, tasks, shared
        self._base: dict[tuple[int, int], list[RowScores]] = {}  # by examples and seed

    def losses(self, verbs: Mapping[str, str], examples: int, seed: int) -> list[Loss]:
        """One per row. Raises UserError for a recipe that a row cannot be measured with."""
        if (examples, seed) not in self._base:
            self._base[examples, seed] = self._measured(self.shared, examples, seed)
        own = self._measured({**self.shared, **verbs}, examples, seed)
        pairs = zip(self.tasks, self._base[examples, seed], own, strict=True)
        return [lost(task, base, mine) for task, base, mine in pairs]

    def _measured(self, verbs: Mapping[str, str], examples: int, seed: int) -> list[RowScores]:
        judge = Judge(self.llm, verbs)
        for task in self.tasks:
            judge.measure(task, examples, seed, lambda done: None)
        return [judge.found[task][0] for task in self.tasks]


def limit_of(text: str) -> float:
    """Parse 1%, or 0.01. Raises UserError."""
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1:
        raise UserError(f"max-loss={text!r} must be a share from 0 up to 100%, such as 1% or 0.01")
    return value
