"""Near a row the model is sure of, less is asked of the others (LocalLeap, arXiv 2510.07081)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from phasewise.errors import UserError
from phasewise.methods.decode._selectors import Masked, Selector, best, not_negative


@dataclass(frozen=True)
class LocalLeap(Selector):
    """Anchors are rows of at least `threshold`. A row within `radius` positions of an anchor becomes final from
    `relaxed` on, any other from `threshold` on, and the most confident row always.

    Only this step's anchors count, and they are masked rows themselves; the schedule of steps has no say. With
    `radius` 0, or `relaxed` equal to `threshold`, it is the plain threshold rule. Left out: ending a request at an end
    token inside a finished block, which the engine does anyway.
    """

    threshold: float = 0.9
    relaxed: float = 0.75
    radius: int = 4  # positions to either side, within the block

    paper: ClassVar[str] = "arXiv 2510.07081"
    tight: ClassVar[dict[str, object]] = {"threshold": 0.6, "relaxed": 0.3, "radius": 1}

    def __post_init__(self) -> None:
        for knob in ("threshold", "relaxed", "radius"):
            not_negative("local_leap", knob, getattr(self, knob))
        if self.relaxed > self.threshold:
            raise UserError(f"local_leap: relaxed={self.relaxed} must not be above threshold={self.threshold}")

    def __call__(self, masked: Masked) -> list[int]:
        sure = [cell for cell, c in zip(masked.cells, masked.confidence) if c >= self.threshold]

        def asked(cell: int) -> float:
            near = any(abs(cell - anchor) <= self.radius for anchor in sure)
            return self.relaxed if near else self.threshold

        chosen = [i for i, (cell, c) in enumerate(zip(masked.cells, masked.confidence)) if c >= asked(cell)]
        return chosen or best(masked, 1)
