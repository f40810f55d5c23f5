"""How a budget of rows is spread over layers and heads by every method that scores rows.

Over layers as PyramidKV has it (arXiv 2406.02069): attention spreads out in early layers and gathers in late ones, so
budgets fall in a straight line. Over the heads of a layer as AdaKV has it (arXiv 2407.11550): heads compete for one
budget with their scores, above a share that each head has for certain. Either way not one row more or less is kept
than the same for all would be, but for layers whose prompt is shorter than what they might keep.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from math import floor
from typing import Literal

import torch
from torch import Tensor

from phasewise.errors import UserError
from phasewise.verbs.evict import retain

Layers = Literal["uniform", "pyramid"]
Heads = Literal["uniform", "ada"]


@dataclass(frozen=True)
class Spread:
    """`beta`: the last layer of a pyramid keeps 1 / beta of the mean, unless the first would then keep more rows than
    there are. `least`: of the mean, what each head has for certain."""

    layers: Layers = "uniform"
    heads: Heads = "uniform"
    beta: float = 20.0
    least: float = 0.2

    def check(self, name: str) -> None:
        """Raise UserError for the method `name`."""
        if self.layers not in ("uniform", "pyramid"):
            raise UserError(f"{name}: layers={self.layers!r}: choose uniform or pyramid")
        if self.heads not in ("uniform", "ada"):
            raise UserError(f"{name}: heads={self.heads!r}: choose uniform or ada")
        if not self.beta >= 1:
            raise UserError(f"{name}: beta={self.beta} must be at least 1: a pyramid is wide in the first layers")
        if not 0 <= self.least <= 1:
            raise UserError(f"{name}: least={self.least} must lie in [0, 1]: a share of the mean budget of a head")

    def of(self, keep: int, rows: int, layer: int, layers: int) -> int:
        """Of `rows`, how many each head of a layer keeps (with "ada": on average), where it is `keep` on average."""
        return pyramid(keep, rows, layers, self.beta)[layer] if self.layers == "pyramid" else min(keep, rows)


@cache
def pyramid(keep: int, rows: int, layers: int, beta: float) -> tuple[int, ...]:
    """Budgets that fall in a straight line, whole numbers: their sum is exactly layers * keep, none is above `rows`."""
    if keep >= rows or layers == 1:
        return (min(keep, rows),) * layers
    low = Fraction(keep) / Fraction(beta)
    high = 2 * keep - low
    if high >= rows:
        low, high = 2 * keep - Fraction(rows), Fraction(rows)
    line = [high - (high - low) * layer / (layers - 1) for layer in range(layers)]
    down = [floor(value) for value in line]
    # what rounding down leaves goes to those that lost most, which keeps the line falling
    most = sorted(range(layers), key=lambda layer: (down[layer] - line[layer], layer))
    for layer in most[: layers * keep - sum(down)]:
        down[layer] += 1
    return tuple(down)


UNIFORM = Spread()


def allot(scores: Tensor, keep: int, recent: int = 0, spread: Spread = UNIFORM) -> Tensor | list[Tensor]:
    """Slots that stay: the best of scores [H, N], `keep` per head on average, and the `recent` slots after all of them.

    -> increasing [H, min(keep, N) + recent], or one per head where heads compete. Of equal scores, those that rank
    higher in their own head stay, then the earlier slot: equal heads get equal budgets.
    """
    heads, n = scores.shape
    if spread.heads == "uniform" or keep >= n or heads == 1:
        return retain(scores, keep, recent)
    ranked = scores.sort(stable=True, dim=-1, descending=True)
    sure = floor(Fraction(spread.least) * keep)
    rivals = ranked.values[:, sure:].T.flatten()  # [(N - sure) * H], rank by rank
    taken = rivals.sort(stable=True, descending=True).indices[: heads * (keep - sure)] % heads
    counts = (sure + torch.bincount(taken, minlength=heads)).tolist()
    last = torch.arange(n, n + recent, device=scores.device)
    return [torch.cat((ranked.indices[h, :count].sort().values, last)) for h, count in enumerate(counts)]
