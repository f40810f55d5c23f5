"""AWQ (arXiv 2306.00978): inputs that are large get finer levels, by a scale that is taken off where they come from.

Column j of a matrix is multiplied by s_j = (mean |x_j|)^alpha before it is rounded; what makes x_j is divided by it:
the norm before it, or the rows of the matrix before it. alpha is the one of a grid with the least squared error of the
outputs; alpha = 0 are the nearest levels of the matrix as it is. Left out: the search for clipped ranges.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from phasewise.model.layout import layout
from phasewise.model.levels import rounded_to_nearest
from phasewise.model.weights import Tensors
from phasewise.model.weights_form import WeightsForm
from phasewise.train.gptq import row_errors
from phasewise.train.layer_walk import LayerAtWork, LinearInputs
from phasewise.train.rounded_layer import RoundedLayer, RoundedLinear

GRID = tuple(i / 20 for i in range(20))
LEAST = 1e-4  # of a mean magnitude, as in the authors' code

Fold = Callable[[Tensor], Tensor]
"""Scales [in] that are wanted -> those that what comes before can be divided by exactly, near them."""


def searched(
    weight: Tensor, hessian: Tensor, size: Tensor, form: WeightsForm, fold: Fold, grid: tuple[float, ...] = GRID
) -> Tensor:
    """The scales of the inputs of a matrix float32 [out, in], float32 [in].

    `hessian` [in, in] and mean magnitudes `size` [in] of its inputs; all-zero inputs leave the matrix as it is.
    """
    best, least = torch.ones(weight.shape[1]), float("inf")
    if not bool(size.any()):
        return best
    for alpha in grid:
        wanted = size.clamp_min(LEAST).pow(alpha)
        scales = fold(wanted / (wanted.max() * wanted.min()).sqrt())
        values = rounded_to_nearest(weight * scales, form).values() / scales
        error = float(row_errors(weight, hessian, values).sum())
        if error < least:
            best, least = scales, error
    return best


def folded_norm(stored: Tensor, offset: float, scales: Tensor) -> tuple[Tensor, Tensor]:
    """A norm's weight divided by scales, bfloat16 [in], and the scales that it was really divided by, float32 [in].

    The norm multiplies by `stored + offset`. What is stored is rounded, so scales are what then is exact; where there
    is nothing to divide they are 1.
    """
    before = stored.bfloat16().float() + offset
    rounded = (before / scales - offset).bfloat16()
    after = rounded.float() + offset
    kept = (before != 0) & (after != 0)
    return torch.where(kept, rounded, stored.bfloat16()), torch.where(kept, before / after.where(kept, 1), 1.0)


def awq_layer(at: LayerAtWork, seen: Mapping[str, LinearInputs], tensors: Tensors, form: WeightsForm) -> RoundedLayer:
    """A layer in levels: scales of qkv and of gate and up go into the norms before them, those of o into the rows of v,
    those of down into the rows of up. Experts share their norm with a router, so they take their nearest levels."""
    return _LayerScales(at, seen, tensors, form).rounded()


class _LayerScales:
    """The search through one layer."""

    def __init__(self, at: LayerAtWork, seen: Mapping[str, LinearInputs], tensors: Tensors, form: WeightsForm) -> None:
        self.at, self.seen, self.tensors, self.form = at, seen, tensors, form
        self.names = layout(at.config)
        self.weights = {name: at.linear(name).dense() for name in at.linears}
        self.columns: dict[str, Tensor] = {}
        self.rows: dict[str, Tensor] = {}
        self.changed: dict[str, Tensor] = {}

    def rounded(self) -> RoundedLayer:
        config = self.at.config
        queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
        self._by_rows("o", "qkv", queries + keys, self._alike)
        self._by_norm("qkv", "before_attention")
        if "down" in self.weights:
            self._by_rows("down", "gate_up", len(self.weights["gate_up"]) // 2, lambda scales: scales)
            self._by_norm("gate_up", "before_mlp")
        made = {}
        for name, weight in self.weights.items():
            scaled = self._scaled(name) * self.columns.get(name, torch.ones(()))
            made[name] = RoundedLinear(weight, rounded_to_nearest(scaled, self.form, name), self.columns.get(name),
                                       self.rows.get(name), self.seen[name].hessian)  # fmt: skip
        return RoundedLayer(made, self.changed)

    def _scaled(self, name: str) -> Tensor:
        """A weight whose rows have been divided by what was folded into them."""
        rows = self.rows.get(name)
        return self.weights[name] if rows is None else self.weights[name] / rows[:, None]

    def _search(self, name: str, fold: Fold) -> Tensor:
        inputs = self.seen[name]
        return searched(self._scaled(name), inputs.hessian, inputs.size, self.form, fold)

    def _by_rows(self, name: str, before: str, start: int, alike: Fold) -> None:
        """Scales of a layer's inputs, folded into rows from `start` on of the one before it, and into their bias."""
        scales = self._search(name, alike)
        each = self._one_each(name, scales)
        self.columns[name] = scales
        self.rows[before] = torch.cat((torch.ones(start), each))
        for part, rows in self._biases(before):
            own = self.rows[before][rows]
            if bool((own != 1).any()):
                self.changed[part] = (self.tensors.read(part, torch.float32).float() / own).bfloat16()

    def _one_each(self, name: str, scales: Tensor) -> Tensor:
        """Scales of the rows that make inputs: query heads of a group read one head of values."""
        config = self.at.config
        if name != "o":
            return scales
        return scales.view(config.kv_heads, -1, config.head_dim)[:, 0].flatten()

    def _alike(self, scales: Tensor) -> Tensor:
        """Scales [Hq * D] that are the same, their geometric mean, for all query heads that read one head of values."""
        config = self.at.config
        grouped = scales.view(config.kv_heads, -1, config.head_dim)
        return grouped.log().mean(1, keepdim=True).exp().expand_as(grouped).flatten()

    def _biases(self, key: str) -> Iterator[tuple[str, slice]]:
        start = 0
        for part, shape in self.names.get(f"{self.at.index}.{key}.bias", ()):
            yield part, slice(start, start + shape[0])
            start += shape[0]

    def _by_norm(self, name: str, place: str) -> None:
        """Scales of a layer's inputs, folded into the norm that makes them, where there is one."""
        parts = self.names.get(f"{self.at.index}.{place}", ())
        if not parts:
            return
        stored, offset = self.tensors.read(parts[0][0], torch.float32), self.at.config.norm_offset
        scales = self._search(name, lambda wanted: folded_norm(stored, offset, wanted)[1])
        self.columns[name] = scales
        self.changed[parts[0][0]] = folded_norm(stored, offset, scales)[0]
