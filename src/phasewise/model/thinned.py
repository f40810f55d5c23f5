"""A model without some of its sub-layers, attention and MLP apart: another, rough model of the same weights."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from phasewise.model.lowrank import Deltas
from phasewise.model.model import LayerContext, Model


@dataclass(frozen=True, slots=True)
class Route:
    """A way through the layers, as data: those whose attention runs, and those whose MLP does."""

    mixing: frozenset[int]
    feeding: frozenset[int]

    @classmethod
    def without(cls, layers: int, attention: Iterable[int] = (), mlp: Iterable[int] = ()) -> Route:
        """All sub-layers of so many layers but these."""
        every = frozenset(range(layers))
        return cls(every.difference(attention), every.difference(mlp))

    @property
    def sublayers(self) -> int:
        return len(self.mixing) + len(self.feeding)


class Thinned(Model):
    """The same weights and the same KV. A sub-layer that is not on the route leaves the rows as they are, its norms
    included, and an attention that is not writes no keys and values. It runs operator by operator until it is `packed`.
    """

    def __init__(self, model: Model, route: Route) -> None:
        vars(self).update(vars(model))
        self._whole, self.stack = model.stack, None
        self.route = route

    def packed(self) -> Thinned:
        """Itself, from now on in native calls where the model has those; then every layer takes rows' slots in the KV,
        but nothing is written to those of attentions that do not run."""
        if self._whole is not None:
            self.stack = self._whole.only(self.route.mixing, self.route.feeding)
        return self

    @property
    def depth(self) -> int:
        return len(self.route.mixing)

    def layer(self, i: int, x: Tensor, ctx: LayerContext, deltas: Deltas | None = None) -> Tensor:
        layer = self.layers[i]
        if i in self.route.mixing:
            x = layer.mix(x, ctx, deltas)
        return layer.feed(x, ctx, deltas) if i in self.route.feeding else x
