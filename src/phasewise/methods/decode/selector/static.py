"""The most confident rows, as many as the schedule of steps says (SDAR, arXiv 2510.06303)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from phasewise.methods.decode._selectors import Masked, Selector, best


@dataclass(frozen=True)
class Static(Selector):
    """A block of B masks takes exactly `steps` passes; of equally confident rows the lower one comes first."""

    paper: ClassVar[str] = "arXiv 2510.06303"

    def __call__(self, masked: Masked) -> list[int]:
        return best(masked, masked.quota)
