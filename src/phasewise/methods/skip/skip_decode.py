"""Fewer layers for every later token of an answer, in nested sets (SkipDecode, arXiv 2307.02628).

The number of layers that a generated token runs falls with its place in the answer, never with its content. The first
layers and the last ones run; those between are passed by, from the bottom up. Sets shrink and are nested, so every
layer that a token runs holds the KV of all tokens before it: nothing is repaired or recomputed.
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
from phasewise.verbs.method import Method
from phasewise.verbs.skip import Skip
from phasewise.verbs.traits import Traits


@dataclass(frozen=True)
class SkipDecode(Method):
    """The first generated token runs the share `first` of the layers; token `tokens` and all after it run `last`.

    The share falls linearly between them. `warm` first layers always run. Prompts run all layers. Both shares at 1 is
    plain decoding. Left out: the paper fine-tunes the model on its task; this takes the model's own weights.
    """

    first: float = 1.0  # share of the layers
    last: float = 0.5  # share of the layers
    tokens: int = 256  # generated tokens over which the share falls
    warm: int = 1  # layers

    paper: ClassVar[str] = "arXiv 2307.02628"
    guarantee: ClassVar[str] = "lossy"
    needs: ClassVar[str] = "nothing"
    neutral: ClassVar[dict[str, object]] = {"last": 1.0}
    budgets: ClassVar[tuple[dict[str, object], ...]] = ({"last": 0.75}, {})
    tight: ClassVar[dict[str, object]] = {"tokens": 6}

    def __post_init__(self) -> None:
        if not 0 < self.last <= self.first <= 1:
            raise UserError(
                f"skip_decode: last={self.last} must lie in (0, first={self.first}], and first at most at 1"
            )
        if self.tokens < 1 or self.warm < 0:
            raise UserError(f"skip_decode: tokens={self.tokens} must be at least 1, and warm={self.warm} at least 0")

    @property
    def traits(self) -> Traits:
        return Traits("skip", phases=("decode",), skips_rows=self.last < 1)

    def depth(self, layers: int, token: int) -> int:
        """The number of layers that generated token `token`, counted from 0, runs of `layers`; it never rises."""
        share = self.first - (self.first - self.last) * min(1.0, token / max(1, self.tokens - 1))
        return max(min(layers, self.warm + 1), round(share * layers))

    def bind(self, host: Host) -> _SkipDecode | None:
        layers = host.model.config.layers
        if self.depth(layers, self.tokens) == layers:
            return None  # nothing to skip costs nothing
        return _SkipDecode([self.depth(layers, token) for token in range(self.tokens + 1)], layers, self.warm)


class _SkipDecode(Skip):
    """`upto[layer]`: how many generated tokens, the first ones, run a layer; None: all of them."""

    def __init__(self, depths: Sequence[int], layers: int, warm: int) -> None:
        self.upto: list[int | None] = []
        for layer in range(layers):
            running = sum(layer < warm or layer >= layers - (depth - warm) for depth in depths)
            self.upto.append(None if running == len(depths) else running)
        self._walks = [self._running(token) for token in range(len(depths))]

    def _running(self, token: int) -> tuple[int, ...]:
        """The layers that generated token `token` runs."""
        return tuple(layer for layer, upto in enumerate(self.upto) if upto is None or token < upto)

    def walk_of(self, span: Span) -> tuple[int, ...] | None:
        last, start = len(self._walks) - 1, span.request.prompt_len
        first = min(span.positions) - start
        if first < 0:
            return None  # rows of a prompt among them
        walk = self._walks[min(first, last)]
        return walk if self._walks[min(span.last - start, last)] == walk else None

    def rows(self, layer: int, span: Span, x: Tensor) -> Tensor | None:
        upto = self.upto[layer]
        if upto is None:
            return None
        end = span.request.prompt_len + upto  # positions from here on pass the layer by
        if max(span.positions) < end:
            return None
        return torch.tensor([row for row, position in enumerate(span.positions) if position < end], dtype=torch.int64)
