"""A layer whose linear layers have been rounded: their levels, what was folded elsewhere, and how far off they are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from phasewise.model.layout import layout
from phasewise.model.levels import Levels
from phasewise.model.norm import RMSNorm
from phasewise.model.weights import Tensors
from phasewise.train.gptq import row_errors
from phasewise.train.layer_walk import LayerAtWork


@dataclass(frozen=True)
class RoundedLinear:
    """A weight float32 [out, in], and the levels that stand for it: for each of its columns times `columns` [in] and
    its rows over `rows` [out], where those were folded elsewhere."""

    weight: Tensor
    levels: Levels
    columns: Tensor | None = None
    rows: Tensor | None = None
    hessian: Tensor | None = None  # of its inputs before anything was folded

    def values(self) -> Tensor:
        """What stands for the weight, float32 [out, in]."""
        values = self.levels.values()
        values = values if self.columns is None else values / self.columns
        return values if self.rows is None else values * self.rows[:, None]

    def errors(self) -> tuple[float, float | None]:
        """The norm of the weights' error over that of the weights, and the same of outputs over the Hessian's text."""
        values = self.values()
        weights = float((self.weight - values).norm() / self.weight.norm().clamp_min(1e-30))
        if self.hessian is None:
            return weights, None
        off = float(row_errors(self.weight, self.hessian, values).sum())
        all_of_it = float(row_errors(self.weight, self.hessian, torch.zeros_like(values)).sum())
        return weights, (max(0.0, off) / all_of_it) ** 0.5 if all_of_it > 0 else 0.0


@dataclass(frozen=True)
class RoundedLayer:
    """All linear layers of one layer, by the last part of their names, and the tensors of the checkpoint that took over
    what was folded: norms and biases."""

    linears: Mapping[str, RoundedLinear]
    changed: Mapping[str, Tensor] = field(default_factory=dict)

    def errors(self) -> dict[str, tuple[float, float | None]]:
        return {name: linear.errors() for name, linear in self.linears.items()}

    def put_into(self, at: LayerAtWork, tensors: Tensors) -> None:
        """Make the layer compute with what it will have: levels, and what was changed beside them."""
        names, layer, index = layout(at.config), at.layer, at.index

        def now(part: str) -> Tensor:
            return self.changed[part].float() if part in self.changed else tensors.read(part, torch.float32).float()

        for name, linear in self.linears.items():
            parts = names.get(f"{index}.{name}.bias", ())
            bias = torch.cat([now(part) for part, _ in parts]) if parts else None
            at.replace(name, linear.levels.values(), bias)
        for place in ("before_attention", "before_mlp"):
            parts = names.get(f"{index}.{place}", ())
            if parts and parts[0][0] in self.changed:
                weight = now(parts[0][0]) + at.config.norm_offset
                setattr(layer, place, RMSNorm(weight, at.config.eps))
