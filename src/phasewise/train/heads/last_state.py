"""Medusa's and Hydra's heads as they are trained: output matrices shared with the model, wide maps of low rank."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from phasewise.speculation.heads.hydra import HydraHeads, HydraShape, PrefixLayer
from phasewise.speculation.heads.last_state import LastStateHeads
from phasewise.speculation.heads.layers import LAYER, layer_settings, plain_layer
from phasewise.speculation.heads.medusa import MedusaHeads, MedusaShape
from phasewise.train.dense import TokenBlock
from phasewise.train.heads.feature import UnrolledAttention
from phasewise.train.heads.target import FrozenTarget, SeenBlock


class LastStateKind:
    """What both share: each head is learned at all positions at once, behind the right tokens. That is exact, for a
    later guess matters only where the earlier ones were right."""

    own_output, every = False, 1

    def taps(self, module: LastStateHeads) -> tuple[int, ...]:
        return ()

    def begin(self, module: LastStateHeads, target: FrozenTarget, texts: TokenBlock) -> None:
        """Does nothing: no initial weight hangs on the text."""

    def vocabulary(self, module: LastStateHeads) -> Tensor | None:
        return None

    def guesses(self, module: LastStateHeads, target: FrozenTarget, seen: SeenBlock) -> Iterator[Tensor]:
        """Logits of each head in turn, float32 [n, V], where it is learned."""
        for head in range(module.depth):
            path = target.embed(seen.path(head)) if module.reads_path else None
            yield module.logits(head, module.state(head, seen.states(head), path), target.unembed)

    def config(self, module: LastStateHeads, target: FrozenTarget) -> dict[str, Any]:
        return module.config()

    def tensors(self, module: LastStateHeads) -> dict[str, Tensor]:
        return module.state_dict()


@dataclass(frozen=True)
class MedusaKind(LastStateKind):
    """Heads of one residual block each, d^2 + d numbers a head."""

    def build(self, target: FrozenTarget, depth: int, vocabulary: Tensor | None = None) -> MedusaHeads:
        return MedusaHeads(MedusaShape(target.hidden, target.vocab, depth))


@dataclass(frozen=True)
class HydraKind(LastStateKind):
    """Heads of one wide block each. Its two maps are of a low `rank`, so that four heads have about as many numbers as
    four of Medusa's, where full ones would have seven times as many."""

    def build(self, target: FrozenTarget, depth: int, vocabulary: Tensor | None = None) -> HydraHeads:
        return HydraHeads(HydraShape(target.hidden, target.vocab, depth, rank=self.rank(target.hidden, depth)))

    def rank(self, hidden: int, depth: int) -> int:
        """The largest rank at which there are no more numbers than in Medusa's heads."""
        widths = sum(2 * (head + 3) for head in range(depth))  # inputs and outputs of two maps, in widths of the model
        return max(1, (depth * (hidden + 1) - 2 * depth) // widths)


@dataclass(frozen=True)
class HydraPlusKind(HydraKind):
    """Hydra++'s: the same heads behind a prefix layer with one key head and an MLP half as wide as the model. It begins
    by passing states on as they are."""

    def build(self, target: FrozenTarget, depth: int, vocabulary: Tensor | None = None) -> HydraHeads:
        made = super().build(target, depth, vocabulary)
        prefix = PrefixLayer(plain_layer(target.model, narrow=True))
        with torch.no_grad():
            for name in ("self_attn.o_proj", "mlp.down_proj"):
                prefix.get_parameter(f"layers.0.{name}.weight").zero_()
            prefix.norm.weight.fill_(float(target.model.norm.weight.float().square().mean().sqrt()))
        made.prefix_layer = prefix
        return made.to(target.output.device)

    def guesses(self, module: LastStateHeads, target: FrozenTarget, seen: SeenBlock) -> Iterator[Tensor]:
        assert isinstance(module, HydraHeads) and module.prefix_layer is not None
        prefix = module.prefix_layer
        h = prefix.final(prefix.layer(0, seen.h, UnrolledAttention(prefix, seen.block.positions).attend))
        yield from super().guesses(module, target, replace(seen, h=h))

    def config(self, module: LastStateHeads, target: FrozenTarget) -> dict[str, Any]:
        assert isinstance(module, HydraHeads) and module.prefix_layer is not None
        return module.config() | {LAYER: layer_settings(module.prefix_layer.config, target.model)}
