"""Layers in groups whose attentions wait for nobody in the group (arXiv 2502.02493): another, rough model."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor

from phasewise.model.lowrank import Deltas
from phasewise.model.model import LayerContext, Model


class GroupedModel(Model):
    """The same weights and the same KV, but all attentions of a group read the group's input, and so can be computed
    side by side; its MLPs follow in order, each after its own layer's attention has been added.

    A group of one layer is that layer, to the bit. `groups` cut all layers, in order.
    """

    def __init__(self, model: Model, groups: Sequence[range]) -> None:
        assert [i for group in groups for i in group] == list(range(model.config.layers)) and all(groups)
        vars(self).update(vars(model))
        self.stack = None  # the native calls know layers one after another
        self._groups = {group.start: self.layers[group.start : group.stop] for group in groups}

    @property
    def depth(self) -> int:
        return len(self._groups)

    def layer(self, i: int, x: Tensor, ctx: LayerContext, deltas: Deltas | None = None) -> Tensor:
        """The whole group that begins with layer `i`; the other layers have nothing left to do."""
        layers = self._groups.get(i, ())
        mixed = [layer.mix(x, ctx, deltas, bare=True) for layer in layers]
        for layer, own in zip(layers, mixed):
            x = layer.feed(own.add_(x), ctx, deltas)
        return x


def grouped(layers: int, size: int, ends: int = 1) -> list[range]:
    """`layers` cut into groups of `size`; the first and the last `ends` of them are groups of their own."""
    first = min(ends, layers)
    last = max(layers - ends, first)
    starts = [*range(first), *range(first, last, size), *range(last, layers)]
    return [range(start, end) for start, end in pairwise([*starts, layers])]
