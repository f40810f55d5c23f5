"""Some consecutive layers of a model, as a model: rows go in at the first of them and come out behind the last."""

from __future__ import annotations

import copy

from phasewise.model.model import Layer, Model
from phasewise.model.pruned import pruned


class Sliced(Model):
    """The layers of `layers`, numbered from 0. Embeddings, norm and head are the whole model's own, not copies."""

    def __init__(self, model: Model, layers: range) -> None:
        vars(self).update(vars(model))
        self.config = pruned(model.config, layers)
        self.layers = tuple(_renumbered(model.layers[i], number) for number, i in enumerate(layers))
        self.stack, self._walks = self._stacked(range(len(layers))), {}


def _renumbered(layer: Layer, number: int) -> Layer:
    made = copy.copy(layer)
    made.index = number
    return made
