"""All rows at once as soon as the model has made up its mind (Prophet, arXiv 2508.19982)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from phasewise.errors import UserError
from phasewise.methods.decode._selectors import Masked, Selector, best


@dataclass(frozen=True)
class Prophet(Selector):
    """Every masked row becomes final once the mean gap of the two largest logits reaches a threshold.

    The threshold is `early` in the first third of the block's denoising steps, `middle` in the second and `late` in the
    last. Until then the static choice holds. Infinite thresholds are the static selector; thresholds below 0 finish a
    block in one pass. Gaps are differences of logits, whose scale differs by model: calibrate all three.

    Left out: the paper watches only the answer's span where its place is known. This watches all masked rows.
    """

    early: float = 7.5
    middle: float = 5.0
    late: float = 2.5

    paper: ClassVar[str] = "arXiv 2508.19982"
    tight: ClassVar[dict[str, object]] = {"early": 1.5, "middle": 1.0, "late": 0.5}
    reads: ClassVar[tuple[str, ...]] = ("gap",)

    def __post_init__(self) -> None:
        if not self.early >= self.middle >= self.late:
            thresholds = f"early={self.early}, middle={self.middle}, late={self.late}"
            raise UserError(f"prophet: {thresholds} must not rise: later steps ask for less")

    def __call__(self, masked: Masked) -> list[int]:
        threshold = (self.early, self.middle, self.late)[min(2, int(3 * masked.progress))]
        rows = len(masked.confidence)
        return list(range(rows)) if sum(masked.gap) >= threshold * rows else best(masked, masked.quota)
