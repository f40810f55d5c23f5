"""Rows from the lowest entropy up while their sum stays below a bound (entropy-bounded; SDAR, arXiv 2510.06303)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from phasewise.methods.decode._selectors import Masked, Selector, ascending, not_negative


@dataclass(frozen=True)
class Entropy(Selector):
    """The longest such prefix, one row at least; the schedule of steps has no say."""

    threshold: float = 0.6  # summed nats

    paper: ClassVar[str] = "arXiv 2510.06303"
    tight: ClassVar[dict[str, object]] = {"threshold": 4.0}
    reads: ClassVar[tuple[str, ...]] = ("entropy",)

    def __post_init__(self) -> None:
        not_negative("entropy", "threshold", self.threshold)

    def __call__(self, masked: Masked) -> list[int]:
        chosen: list[int] = []
        total = 0.0
        for row in ascending(masked.entropy):
            total += masked.entropy[row]
            if chosen and total >= self.threshold:
                break
            chosen.append(row)
        return chosen
