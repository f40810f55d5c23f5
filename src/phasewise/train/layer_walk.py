"""A model's layers, one after the other, over calibration texts: what their linear layers are given to multiply.

All is float32, and a layer's weights are in memory while it is the one at work. The texts reach a layer through those
before it as they have been left, so rounded layers hand on what they will hand on when the model is used.

Trained models give a few tokens, above all the first, activations a thousand times as large as all others (arXiv
2402.17762). As they are, those would outweigh what the others bring. Left out, nothing would keep a layer's output for
them, which every later token attends to. So rows are counted with a limited length (`LONGEST`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from phasewise.model.alone import TextAlone
from phasewise.model.config import ModelConfig
from phasewise.model.layout import layout
from phasewise.model.mlp import MLP
from phasewise.model.model import Layer
from phasewise.model.rope import RopeTables
from phasewise.model.weights import Tensors, Weights
from phasewise.ops.linear import Linear

LONGEST = 4.0  # times the median length of a text's rows: a longer row counts as one of this length


@dataclass
class LinearInputs:
    """What a linear layer has been given, rows of limited length: X^T X [in, in], the sum of |x| [in], their number."""

    hessian: Tensor
    magnitude: Tensor
    rows: int = 0

    @classmethod
    def none(cls, inputs: int) -> LinearInputs:
        return cls(torch.zeros(inputs, inputs), torch.zeros(inputs))

    def add(self, x: Tensor) -> None:
        """Count the rows of one text, float32 [T, in]."""
        x = shortened(x)
        self.hessian += x.T @ x
        self.magnitude += x.abs().sum(0)
        self.rows += len(x)

    @property
    def size(self) -> Tensor:
        """Mean magnitudes [in]."""
        return self.magnitude / max(1, self.rows)


def shortened(x: Tensor) -> Tensor:
    """Rows float32 [T, n] of which none is longer than `LONGEST` times the median."""
    length = x.norm(dim=1, keepdim=True)
    longest = LONGEST * float(length.median()) if len(x) else 0.0
    return x * (longest / length).clamp_max(1) if longest > 0 else x


class Watched:
    """A linear layer that tells what it is given."""

    def __init__(self, linear: Linear, inputs: LinearInputs) -> None:
        self._linear, self._inputs = linear, inputs

    def __call__(self, x: Tensor, add: Tensor | None = None) -> Tensor:
        self._inputs.add(x)
        return self._linear(x, add)


class LayerAtWork:
    """One layer, whose linear layers go by the last part of their names in `layout`: qkv, o, gate_up, expert.0.down."""

    def __init__(self, index: int, config: ModelConfig, weights: Weights) -> None:
        self.index, self.config = index, config
        self.layer = Layer(index, config, weights)

    @property
    def linears(self) -> list[str]:
        mlp = self.layer.mlp
        if isinstance(mlp, MLP):
            return ["qkv", "o", "gate_up", "down"]
        each = [f"expert.{e}.{name}" for e in range(len(mlp.experts)) for name in ("gate_up", "down")]
        return ["qkv", "o", *each]

    def _place(self, name: str) -> tuple[object, str]:
        """The object that has a linear layer, and the name of its attribute."""
        if name in ("qkv", "o"):
            return self.layer, name
        mlp, last = self.layer.mlp, name.rpartition(".")[2]
        return (mlp, last) if isinstance(mlp, MLP) else (mlp.experts[int(name.split(".")[1])], last)

    def linear(self, name: str) -> Linear:
        owner, attribute = self._place(name)
        found: Linear = getattr(owner, attribute)
        return found

    def replace(self, name: str, weight: Tensor, bias: Tensor | None) -> None:
        """Another weight float32 [out, in] and bias [out] in the place of a linear layer's own."""
        owner, attribute = self._place(name)
        setattr(owner, attribute, Linear(weight, bias, packed=False))

    def watch(self, run: Callable[[], object]) -> dict[str, LinearInputs]:
        """What each linear layer is given in `run`."""
        found = {}
        kept = {name: self.linear(name) for name in self.linears}
        try:
            for name, linear in kept.items():
                found[name] = LinearInputs.none(linear.inputs)
                owner, attribute = self._place(name)
                setattr(owner, attribute, Watched(linear, found[name]))
            run()
        finally:
            for name, linear in kept.items():
                owner, attribute = self._place(name)
                setattr(owner, attribute, linear)
        return found


class LayerWalk:
    """The layers of a model in their order, from the one called `first` on, whose inputs `hidden` are [T, d] per text
    (None: embeddings)."""

    def __init__(
        self, config: ModelConfig, tensors: Tensors, texts: Sequence[Sequence[int]], first: int = 0,
        hidden: Sequence[Tensor] | None = None,
    ) -> None:  # fmt: skip
        self.config, self.index = config, first
        self._weights = Weights(tensors, layout(config), torch.float32, torch.device("cpu"))
        self._ropes = RopeTables(config.ropes, config.max_positions, torch.float32, torch.device("cpu"))
        self.hidden = list(hidden) if hidden is not None else self._embedded(texts)

    def _embedded(self, texts: Sequence[Sequence[int]]) -> list[Tensor]:
        table = self._weights.take("embed")
        return [table[torch.tensor(text)] * self.config.embed_scale for text in texts]

    def next(self) -> LayerAtWork:
        """The layer that comes next, as the checkpoint has it."""
        made = LayerAtWork(self.index, self.config, self._weights)
        self.index += 1
        return made

    def run(self, at: LayerAtWork) -> list[Tensor]:
        """What a layer makes of the texts, [T, d] each."""
        out = []
        for x in self.hidden:
            alone = TextAlone(self.config, self._ropes(torch.arange(len(x))), len(x))
            out.append(at.layer(x, alone))
        return out
