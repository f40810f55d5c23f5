"""Selectors of diffusion decoding: which masked rows of a block become final in this step.

Rows come in order of position; ties go to the lower one. Each selector returns at least one row, so a block of m masks
is done after at most m steps. Rules as in SDAR (arXiv 2510.06303) and Fast-dLLM (arXiv 2505.22618).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Masked:
    """What a step found out about the masked rows of one block, in order of position."""

    confidence: Sequence[float]  # untempered probability of each row's candidate
    entropy: Sequence[float]  # nats; empty unless the selector reads it
    quota: int  # rows the static schedule would make final now


Selector = Callable[[Masked, float], list[int]]


def sequential(masked: Masked, threshold: float) -> list[int]:
    """The next `quota` rows from the left."""
    return list(range(min(masked.quota, len(masked.confidence))))


def static(masked: Masked, threshold: float) -> list[int]:
    """The `quota` most confident rows."""
    return _ascending([-c for c in masked.confidence])[: masked.quota]


def dynamic(masked: Masked, threshold: float) -> list[int]:
    """All rows more confident than `threshold` if they are at least the quota, else the static choice."""
    sure = [i for i, c in enumerate(masked.confidence) if c > threshold]
    return sure if len(sure) >= masked.quota else static(masked, threshold)


def entropy(masked: Masked, threshold: float) -> list[int]:
    """Rows from the lowest entropy up while their sum stays below `threshold` nats, one at least."""
    chosen: list[int] = []
    total = 0.0
    for row in _ascending(masked.entropy):
        total += masked.entropy[row]
        if chosen and total >= threshold:
            break
        chosen.append(row)
    return chosen


SELECTORS: dict[str, Selector] = {
    "sequential": sequential,
    "static": static,
    "dynamic": dynamic,
    "entropy": entropy,
}
THRESHOLDS = {"sequential": 0.0, "static": 0.0, "dynamic": 0.9, "entropy": 0.6}  # defaults


def quota(block: int, steps: int, step: int) -> int:
    """Rows of `block` that fall to step `step` of `steps`: an even split, the remainder first; one at least."""
    return max(1, block // steps + (step < block % steps))


def _ascending(keys: Sequence[float]) -> list[int]:
    return sorted(range(len(keys)), key=keys.__getitem__)  # a stable sort
