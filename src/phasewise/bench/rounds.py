"""Comparing fairly: every round runs each contender once, in rotating order, and only ratios within a round count."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


def order(contenders: Sequence[T], number: int) -> list[T]:
    """The contenders of one round: each round begins with another one, so that a drift favours nobody."""
    at = number % len(contenders) if contenders else 0
    return [*contenders[at:], *contenders[:at]]


@dataclass(frozen=True, slots=True)
class Ratio:
    """Median of the per-round ratios of one contender to another, and their range, over `n` rounds."""

    median: float
    low: float
    high: float
    n: int

    def __str__(self) -> str:
        return f"{self.median:.2f}" if self.n == 1 else f"{self.median:.2f} ({self.low:.2f} to {self.high:.2f})"


def ratio(ours: Mapping[int, float], theirs: Mapping[int, float]) -> Ratio | None:
    """{round: value} against {round: value}; rounds that one side lacks do not count. None if none is left."""
    each = [ours[number] / theirs[number] for number in ours if theirs.get(number)]
    return Ratio(statistics.median(each), min(each), max(each), len(each)) if each else None


def interval(ours: Mapping[int, float], theirs: Mapping[int, float]) -> tuple[float, float] | None:
    """95 % of the medians of per-round ratios, by bootstrap over the rounds (percentiles of 9,999 resamples, seeded).
    None of fewer than three rounds."""
    import numpy as np
    from scipy.stats import bootstrap

    each = [ours[number] / theirs[number] for number in ours if theirs.get(number)]
    if len(each) < 3:
        return None
    found = bootstrap((each,), np.median, method="percentile", rng=0).confidence_interval
    return float(found.low), float(found.high)


def median(values: Mapping[int, float]) -> float | None:
    return statistics.median(values.values()) if values else None


def agreement(a: Sequence[Sequence[int]], b: Sequence[Sequence[int]]) -> float:
    """Share of tokens before the first difference, over all sequences; 1.0 = the same text."""
    total = sum(max(len(x), len(y)) for x, y in zip(a, b, strict=True))
    same = sum(next((i for i, (p, q) in enumerate(zip(x, y)) if p != q), min(len(x), len(y))) for x, y in zip(a, b))
    return same / total if total else 1.0
