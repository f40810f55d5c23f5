"""The same evenly spread layers for every generated token; prompts take them all (arXiv 2404.06954).

Promises a fixed price: each decoded row runs floor(layers / speedup) layers, and the KV of the others is freed as soon
as the prompt is done. A shallower model than the one trained, which must be tuned: low-rank weights that only decoded
rows run with, trained with full-depth prompts and shallow replies (train/artefacts/skip_unified.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from phasewise.errors import UserError
from phasewise.model.artefacts import Artefact
from phasewise.model.config import ModelConfig
from phasewise.model.lowrank import Delta, shapes
from phasewise.step.span import Span
from phasewise.verbs.host import Host
from phasewise.verbs.method import Method
from phasewise.verbs.skip import Skip
from phasewise.verbs.traits import Traits

RANK = 16  # of the low-rank weights of each linear layer that runs


@dataclass(frozen=True)
class Unified(Method):
    """First and last layer always run; those between are spread evenly. `speedup` 1 runs everything, untuned.

    `weights`: `auto` (trained for this model and speed-up; beside the model, or shipped), a file, `random:SEED` (to
    test with), or `none`: the model's own weights alone, which is the control. Left out: the paper's index rule, which
    bunches layers at fractional speed-ups, and its tuning of all weights, which would change prompts as well.
    """

    speedup: float = 2.0
    weights: str = "auto"

    paper: ClassVar[str] = "arXiv 2404.06954"
    guarantee: ClassVar[str] = "lossy"
    needs: ClassVar[str] = "trained"
    neutral: ClassVar[dict[str, object]] = {"speedup": 1.0}
    untrained: ClassVar[dict[str, object]] = {"weights": "none"}
    budgets: ClassVar[tuple[dict[str, object], ...]] = ({}, {"weights": "none"})

    def __post_init__(self) -> None:
        if not self.speedup >= 1:
            raise UserError(f"unified: speedup={self.speedup} must be at least 1 (1 = all layers)")

    def artefact(self, config: ModelConfig) -> Artefact:
        """Low-rank weights of the layers that run."""
        tensors = shapes(config, kept(config.layers, self.speedup), RANK)
        return Artefact("skip.unified", tensors, {"speedup": self.speedup}, "say weights=none to skip layers untuned")

    @property
    def traits(self) -> Traits:
        return Traits("skip", phases=("decode",), low_rank=self.weights != "none" and self.speedup > 1)

    def bind(self, host: Host) -> _Unified | None:
        config = host.model.config
        walk = tuple(kept(config.layers, self.speedup))
        if len(walk) == config.layers:
            return None  # nothing to skip costs nothing
        if self.weights == "none":
            return _Unified(walk, config.layers, None)
        tensors = host.artefact(self.artefact(config), self.weights)
        return _Unified(walk, config.layers, Delta(tensors, host.model.dtype, host.model.device))


class _Unified(Skip):
    def __init__(self, walk: tuple[int, ...], layers: int, delta: Delta | None) -> None:
        self.walk, self.delta = walk, delta
        self.skipped = frozenset(range(layers)).difference(walk)
        self.nobody = torch.empty(0, dtype=torch.int64)

    def rows(self, layer: int, span: Span, x: Tensor) -> Tensor | None:
        return self.nobody if layer in self.skipped else None

    def unused(self, layers: int) -> Sequence[int]:
        return sorted(self.skipped)


def kept(layers: int, speedup: float) -> list[int]:
    """The layers that run, increasing: floor(layers / speedup) of them, though never fewer than the first and last."""
    count = min(layers, max(2, int(layers / speedup)))
    return [round(i * (layers - 1) / max(count - 1, 1)) for i in range(count)]
