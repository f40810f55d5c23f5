"""Differences of one training pass from plain causal decoding: what a method does when it serves, as data.

`Dense.hidden(blocks, Pass(...))` is the twin of the engine's step: layers that some rows skip, keys and values of a
prompt that another pass computed, masks, low-rank weights, taps. tests/train/test_twin.py holds the two together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

Rope = tuple[Tensor, Tensor]  # cosines and sines [tokens, 1, head_dim]
Sizes = Sequence[tuple[int, int]]
"""Rows and length of every block, in the order of the tokens."""


class Change(Protocol):
    """The addition of low-rank weights to a linear layer (`qkv`, `o`, `gate_up` or `down`); None = nothing there."""

    def __call__(self, layer: int, linear: str, x: Tensor) -> Tensor | None:
        """x [tokens, in] -> [tokens, out]; q, k and v, gate and up lie one after the other."""
        ...


@dataclass(eq=False)
class Past:
    """Finished keys and values that the rows of one block read before their own; padding is not `real`."""

    real: Tensor  # bool [rows, n]
    layers: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)  # k (rotated) and v [rows, n, kv_heads, D]


@dataclass(eq=False)
class Blend:
    """A blend of two attentions: every head's own `share` of that over all it may see, and for the rest that over
    what is `near`. `share`: [layers, kv_heads]; `near`: one per block, bool [rows, length, past + length]."""

    share: Tensor
    near: Sequence[Tensor]


@dataclass(eq=False)
class Pass:
    """The options of a pass besides reading causally through every layer. None is plain.

    `sees(layer, block)`: bool [rows or 1, length, length], what a row may read of its own block; None = causal.
    `past`: one per block. `gates`: per layer, whether it runs: for everybody, or bool [tokens]; rows that do not run it
    pass unchanged and leave no keys there. `delta`: low-rank weights, for the rows of `tuned` (bool [tokens]; None =
    all). `taps`: the outputs of the layers that are its keys, filled in. `kept`: one per block, given the keys and
    values of every layer that runs. `instead`: one per block, keys and values that its rows read in the place of their
    own. `picks(layer, block, q, k)`: what rows choose by queries and keys, [rows, length, heads or kv_heads, D]: bool
    [rows, kv_heads, length, length]. `blend`: heads that mix attention over everything with attention over less.
    `soft`: int64 [n] of all tokens, and rows [n, hidden] that enter in their place.
    """

    sees: Callable[[int, int], Tensor | None] | None = None
    past: Sequence[Past] | None = None
    gates: Sequence[bool | Tensor] | None = None
    delta: Change | None = None
    tuned: Tensor | None = None
    taps: dict[int, Tensor] = field(default_factory=dict)
    kept: Sequence[Past] | None = None
    instead: Sequence[Past] | None = None
    picks: Callable[[int, int, Tensor, Tensor], Tensor] | None = None
    blend: Blend | None = None
    soft: tuple[Tensor, Tensor] | None = None

    def gate(self, layer: int) -> bool | Tensor:
        return True if self.gates is None else self.gates[layer]


class LayerPass:
    """One layer of a pass: what its attention and its linear layers ask. `rows`: the tokens that run it, None = all."""

    def __init__(self, layer: int, how: Pass, sizes: Sizes, rows: Tensor | None) -> None:
        self.layer, self.how, self.sizes, self.rows = layer, how, sizes, rows
        self.total = sum(count * length for count, length in sizes)
        tuned = how.tuned if how.tuned is None or rows is None else how.tuned[rows]
        self._tuned = None if tuned is None else tuned.unsqueeze(1)

    def change(self, linear: str, x: Tensor) -> Tensor | None:
        """The addition of the low-rank weights to a linear layer's output."""
        change = None if self.how.delta is None else self.how.delta(self.layer, linear, x)
        return change if change is None or self._tuned is None else change * self._tuned

    def spread(self, x: Tensor) -> Tensor:
        """Tokens that run the layer [n, ...] at their places among all [tokens, ...]; zeros elsewhere."""
        return x if self.rows is None else x.new_zeros(self.total, *x.shape[1:]).index_copy(0, self.rows, x)

    def gather(self, x: Tensor) -> Tensor:
        """The way back."""
        return x if self.rows is None else x[self.rows]

    def reads(self, block: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """The keys and values that a block's rows read, [rows, past + length, kv_heads, D] each, and the mask [rows or
        1, length, past + length] of it; None = causal."""
        if self.how.kept is not None:
            self.how.kept[block].layers[self.layer] = (k, v)
        if self.how.instead is not None:
            k, v = self.how.instead[block].layers[self.layer]
        sees = None if self.how.sees is None else self.how.sees(self.layer, block)
        if sees is None and self.how.past is None and self.rows is None:
            return k, v, None
        length = k.shape[1]
        own = torch.ones(length, length, dtype=torch.bool, device=k.device).tril_()[None] if sees is None else sees
        if self.rows is not None:  # who does not run the layer is not read, but for itself: nobody may see nothing
            own = own & self._ran(block)[:, None] | torch.eye(length, dtype=torch.bool, device=k.device)
        if self.how.past is None:
            return k, v, own
        past = self.how.past[block]
        before_k, before_v = past.layers[self.layer]
        before = past.real[:, None].expand(-1, length, -1)  # [rows, length, past]
        mask = torch.cat((before, own.expand(len(before), -1, -1)), -1)
        return torch.cat((before_k, k), 1), torch.cat((before_v, v), 1), mask

    def _ran(self, block: int) -> Tensor:
        assert self.rows is not None
        ran = torch.zeros(self.total, dtype=torch.bool, device=self.rows.device)
        ran[self.rows] = True
        counts = [count * length for count, length in self.sizes]
        return torch.split(ran, counts)[block].view(self.sizes[block])
