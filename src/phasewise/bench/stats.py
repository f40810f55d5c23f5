"""Intervals of paired differences: the same examples, answered twice."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

Z = 1.96


@dataclass(frozen=True)
class Difference:
    """The mean of a - b over n pairs, with its 95 % interval."""

    mean: float
    low: float
    high: float
    n: int

    def text(self, percent: bool) -> str:
        """With a sign, in percentage points or nats."""
        if percent:
            return f"{self.mean * 100:+.1f} points ({self.low * 100:+.1f} to {self.high * 100:+.1f})"
        return f"{self.mean:+.3f} nats ({self.low:+.3f} to {self.high:+.3f})"


def shares(a: Sequence[float], b: Sequence[float]) -> Difference:
    """The interval of a difference of answers that are right (1) or wrong (0): Bonett and Price's interval, which has a
    width even where both always agree."""
    n = len(a)
    only_a = sum(x > y for x, y in zip(a, b, strict=True))
    only_b = sum(x < y for x, y in zip(a, b, strict=True))
    p, q = (only_a + 1) / (n + 2), (only_b + 1) / (n + 2)
    half = Z * math.sqrt((p + q - (p - q) ** 2) / (n + 2))
    return Difference((only_a - only_b) / n, max(-1.0, p - q - half), min(1.0, p - q + half), n)


def means(a: Sequence[float], b: Sequence[float]) -> Difference:
    """The normal interval of the mean difference of paired measurements."""
    each = [x - y for x, y in zip(a, b, strict=True)]
    centre = statistics.fmean(each)
    half = Z * statistics.stdev(each) / math.sqrt(len(each)) if len(each) > 1 else math.inf
    return Difference(centre, centre - half, centre + half, len(each))
