"""The same evenly spread layers for every generated token; prompts take them all (arXiv 2404.06954).

Promises a fixed price: each decoded row runs floor(layers / speedup) layers, and the KV of the others is freed as soon
as the prompt is done. A shallower model than the one trained, so quality needs fine-tuning.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from phasewise.errors import UserError
from phasewise.step.span import Span
from phasewise.verbs.host import Host


@dataclass(frozen=True)
class Unified:
    """First and last layer always run; those between are spread evenly. `speedup` 1 runs everything.

    Left out: the paper's fine-tuning, and its index rule, which bunches layers at fractional speed-ups.
    """

    speedup: float = 2.0

    paper: ClassVar[str] = "arXiv 2404.06954"
    guarantee: ClassVar[str] = "lossy"
    needs: ClassVar[str] = "trained"
    neutral: ClassVar[dict[str, object]] = {"speedup": 1.0}
    phases: ClassVar[tuple[str, ...]] = ("decode",)

    def __post_init__(self) -> None:
        if not self.speedup >= 1:
            raise UserError(f"unified: speedup={self.speedup} must be at least 1 (1 = all layers)")

    def bind(self, host: Host) -> _Unified | None:
        layers = host.model.config.layers
        skipped = sorted(set(range(layers)) - set(kept(layers, self.speedup)))
        return _Unified(skipped) if skipped else None  # nothing to skip costs nothing


class _Unified:
    def __init__(self, skipped: Sequence[int]) -> None:
        self.skipped = frozenset(skipped)
        self.nobody = torch.empty(0, dtype=torch.int64)

    def rows(self, layer: int, span: Span, x: Tensor) -> Tensor | None:
        return self.nobody if layer in self.skipped else None

    def unused(self, layers: int) -> Sequence[int]:
        return sorted(self.skipped)


def kept(layers: int, speedup: float) -> list[int]:
    """The layers that run, increasing: floor(layers / speedup) of them, though never fewer than the first and last."""
    count = min(layers, max(2, int(layers / speedup)))
    return [round(i * (layers - 1) / max(count - 1, 1)) for i in range(count)]
