"""All rows the model is sure of, but never fewer than the schedule of steps says (SDAR, arXiv 2510.06303)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from phasewise.methods.decode._selectors import Masked, Selector, best, not_negative


@dataclass(frozen=True)
class Dynamic(Selector):
    """Rows more confident than `threshold` become final if they are at least the step's share, else the static choice.

    A threshold of 1 or more is the static selector.
    """

    threshold: float = 0.9  # a probability

    paper: ClassVar[str] = "arXiv 2510.06303"
    tight: ClassVar[dict[str, object]] = {"threshold": 0.4}

    def __post_init__(self) -> None:
        not_negative("dynamic", "threshold", self.threshold)

    def __call__(self, masked: Masked) -> list[int]:
        sure = [i for i, c in enumerate(masked.confidence) if c > self.threshold]
        return sure if len(sure) >= masked.quota else best(masked, masked.quota)
