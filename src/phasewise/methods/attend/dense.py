"""Every row reads everything it may see: exact attention, the reference of every other method."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from phasewise.step.read import Read
from phasewise.step.reads import attend_all


@dataclass(frozen=True)
class Dense:
    """Exact attention over all visible rows."""

    paper: ClassVar[str] = ""
    guarantee: ClassVar[str] = "exact"
    needs: ClassVar[str] = "nothing"
    neutral: ClassVar[dict[str, object]] = {}
    everything: ClassVar[bool] = True
    phases: ClassVar[tuple[str, ...]] = ("prefill", "decode")

    def __call__(self, reads: Sequence[Read]) -> list[Tensor]:
        return attend_all(reads)
