"""One text by itself, run through layers from position 0 without a cache: what calibration looks at."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from phasewise.errors import UnsupportedModel
from phasewise.model.config import ModelConfig
from phasewise.model.rope import Rotary
from phasewise.ops.attention import attention

Cached = Callable[[int, Tensor, Tensor], None]
"""(layer, k, v): told of what a layer would cache, [T, Hkv, D] each."""


class TextAlone:
    """What layers ask of a step (`LayerContext`): each token sees all before it within its layer's window.

    Raises UnsupportedModel for a model whose attention has sink scores.
    """

    def __init__(self, config: ModelConfig, rotary: Rotary, length: int, cached: Cached | None = None) -> None:
        if config.sink_scores:
            raise UnsupportedModel(
                f"{config.family}: its attention has sink scores, with which nothing can be calibrated."
            )
        self.config, self.rotary, self.cached = config, rotary, cached
        places = torch.arange(length)
        self.distance = places[:, None] - places
        self.masks: dict[int | None, Tensor] = {}

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        spec = self.config.attention[layer]
        if self.cached is not None:
            self.cached(layer, k, v)
        if spec.window not in self.masks:
            near = self.distance < (spec.window or len(self.distance))
            self.masks[spec.window] = ((self.distance >= 0) & near)[None]
        k, v = k.transpose(0, 1).contiguous(), v.transpose(0, 1).contiguous()
        return attention(q.contiguous(), k, v, self.masks[spec.window], spec.scale, spec.softcap)

    def count(self, counter: str, n: int) -> None:
        """Counts nothing."""
