"""The next rows from the left, as many as the schedule of steps says (SDAR, arXiv 2510.06303)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from phasewise.methods.decode._selectors import Masked, Selector


@dataclass(frozen=True)
class Sequential(Selector):
    """A block is filled in order of position, whatever the model is sure of."""

    paper: ClassVar[str] = "arXiv 2510.06303"

    def __call__(self, masked: Masked) -> list[int]:
        return list(range(min(masked.quota, len(masked.confidence))))
