"""Low-rank weights beside a model's own (LoRA, arXiv 2106.09685): y = x W^T + (x A^T) B^T for the rows that ask for it.

The rows of everybody else in the batch are computed as if there were none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from phasewise.model.config import ModelConfig
from phasewise.ops.linear import Linear
from phasewise.ops.native.abi import LowRankStruct, Structures
from phasewise.ops.native.stack import LowRank, low_rank_table
from phasewise.ops.native.weights import PackedWeights

LINEARS = ("qkv", "o", "gate_up", "down")
LowRankAddition = Callable[[int, str, Tensor], Tensor | None]
"""(layer, linear, x) -> what low-rank weights add to that linear layer's output: a `Delta`, or one that is trained."""


def shapes(config: ModelConfig, layers: Iterable[int], rank: int) -> dict[str, tuple[int, ...]]:
    """`<layer>.<linear>.a` [rank, in] and `.b` [out, rank] for all linear layers of `layers`; experts have none.

    `linear` is one of qkv (q, k and v, one after the other), o, gate_up and down.
    """
    q, kv, inner = config.heads * config.head_dim, config.kv_heads * config.head_dim, config.intermediate
    attention = {"qkv": (config.hidden, q + 2 * kv), "o": (q, config.hidden)}
    mlp = {"gate_up": (config.hidden, 2 * inner), "down": (inner, config.hidden)}
    out: dict[str, tuple[int, ...]] = {}
    for layer in layers:
        for linear, (inputs, outputs) in (attention | ({} if config.moe[layer] else mlp)).items():
            out[f"{layer}.{linear}.a"] = (rank, inputs)
            out[f"{layer}.{linear}.b"] = (outputs, rank)
    return out


class Delta:
    """Low-rank weights under the names of `shapes`, cast to the model's dtype; layers may be left out."""

    def __init__(self, tensors: Mapping[str, Tensor], dtype: torch.dtype, device: torch.device) -> None:
        names = {name.rpartition(".")[0] for name in tensors}
        # packed like the model's own, so that a row's result does not depend on how many rows there are
        self._pairs = {
            name: tuple(Linear(tensors[f"{name}.{part}"].to(device, dtype).contiguous()) for part in "ab")
            for name in sorted(names)
        }
        self._tables: dict[tuple[int, ...], Structures[LowRankStruct] | None] = {}
        self._joined: list[object] = []  # weights that tables have the addresses of

    def table(
        self, layers: Sequence[int], beside: Mapping[tuple[int, int], LowRank] | None = None
    ) -> Structures[LowRankStruct] | None:
        """Both halves of these layers' four linears as native steps take them (LowRank of kernels.h [layers, 4]); None
        where they are not packed for those. `beside`: what the model itself has beside (layer, linear), which its rows
        run with as well."""
        key = tuple(layers)
        if key not in self._tables:
            self._tables[key] = self._table(key, beside or {})
        return self._tables[key]

    def _table(
        self, layers: Sequence[int], beside: Mapping[tuple[int, int], LowRank]
    ) -> Structures[LowRankStruct] | None:
        found = {at: pair for at, pair in beside.items() if at[0] in layers}
        for layer in layers:
            for which, name in enumerate(LINEARS):
                own = self._pairs.get(f"{layer}.{name}")
                if own is None:
                    continue
                down, up = own[0].native, own[1].native
                if down is None or up is None:
                    return None
                theirs = found.get((layer, which))
                found[layer, which] = (down, up) if theirs is None else _joined(theirs, (down, up))
        self._joined.append(found)
        return low_rank_table(layers, found)

    def __call__(self, layer: int, linear: str, x: Tensor) -> Tensor | None:
        """The addition to a linear layer's output, [T, in] -> [T, out]; None = nothing there."""
        pair = self._pairs.get(f"{layer}.{linear}")
        return None if pair is None else pair[1](pair[0](x))


def _joined(one: LowRank, other: LowRank) -> LowRank:
    """Low-rank weights that add what both add."""
    return (
        PackedWeights(torch.cat([one[0].dense(), other[0].dense()]), None),
        PackedWeights(torch.cat([one[1].dense(), other[1].dense()], 1), None),
    )


class Deltas:
    """The low-rank weights of the rows of one call of a layer: `groups` of (weights, int64 rows or None = all)."""

    def __init__(self, groups: Sequence[tuple[LowRankAddition, Tensor | None]]) -> None:
        self.groups = groups

    def add(self, layer: int, linear: str, x: Tensor, y: Tensor) -> None:
        """Adds to y [T, out] what the input x [T, in] of this linear layer calls for, in place."""
        for delta, rows in self.groups:
            change = delta(layer, linear, x if rows is None else x[rows])
            if change is None:
                continue
            if rows is None:
                y.add_(change)
            else:
                y.index_add_(0, rows, change)
