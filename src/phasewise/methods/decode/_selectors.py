"""The interface and shared parts of diffusion selectors, which are files of `selector/`.

Rules as in SDAR (arXiv 2510.06303) and Fast-dLLM (arXiv 2505.22618), but for the confidence: it is untempered here, and
SDAR's is what temperature and top-p leave of it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from phasewise.errors import UserError

if TYPE_CHECKING:
    from phasewise.verbs.host import Host


@dataclass(frozen=True, slots=True)
class Masked:
    """Predictions of a step for the masked rows of one block, in order of position."""

    confidence: Sequence[float]  # untempered probability of each row's candidate
    entropy: Sequence[float]  # nats; empty unless the selector `reads` it
    quota: int  # rows the static schedule would make final now
    cells: Sequence[int]  # where in the block the rows stand, increasing
    gap: Sequence[float] = ()  # each row's largest logit less its second largest; empty unless the selector `reads` it
    progress: float = 0.0  # share of the block's denoising steps that are done, in [0, 1]


class Selector(ABC):
    """A part of the kind `decode.selector`, or its runtime: which rows become final in this step.

    Rows come in order of position; ties go to the lower one. At least one is chosen, so that a block of m masks is done
    after at most m steps. The choice depends on `masked` alone.
    """

    reads: ClassVar[tuple[str, ...]] = ()  # what is worked out for it besides confidences: "entropy", "gap"

    @abstractmethod
    def __call__(self, masked: Masked) -> list[int]:
        """Indices into the masked rows, each once."""

    def bind(self, host: Host) -> Selector:
        """Returns the runtime that works in its place in one engine."""
        return self


def not_negative(selector: str, knob: str, value: float) -> None:
    """Raise UserError unless a knob's value is a number of at least 0."""
    if not value >= 0:
        raise UserError(f"{selector}: {knob}={value} must not be negative")


def best(masked: Masked, count: int) -> list[int]:
    """The `count` most confident rows, best first."""
    return ascending([-c for c in masked.confidence])[:count]


def ascending(keys: Sequence[float]) -> list[int]:
    return sorted(range(len(keys)), key=keys.__getitem__)  # a stable sort


def quota(block: int, steps: int, step: int) -> int:
    """Rows of `block` that fall to step `step` of `steps`: an even split, the remainder first; one at least."""
    return max(1, block // steps + (step < block % steps))
