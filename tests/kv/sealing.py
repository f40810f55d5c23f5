"""Sealed blocks as slowly as can be: every row forms all that it reads by itself, from rows as the model made them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from phasewise.kv.format import SIDES, BlockFormat, KVShape
from phasewise.step.read import Read
from tests.asking import Asking

Rounder = Callable[[int, Tensor], Tensor]
"""(side, rows [block, D] of one head) -> what they come back as."""


class Slowly(Asking):
    """attend, over rows kept as they are: what a row past the prompt reads is rounded block by block and head by head,
    as far as `cuts` say for the rows that it sees."""

    def __init__(self, cuts: Any, rounder: Rounder) -> None:
        self.cuts, self._slow = cuts, rounder
        self._known: dict[tuple[int, bytes], Tensor] = {}  # many rows read the same blocks

    def rounder(self, side: int, rows: Tensor) -> Tensor:
        key = side, rows.numpy().tobytes()
        if key not in self._known:
            self._known[key] = self._slow(side, rows)
        return self._known[key]

    def __call__(self, reads: Sequence[Read]) -> list[Tensor]:
        return [torch.stack([self._row(read, r) for r in range(read.q.shape[0])]) for read in reads]

    def _row(self, read: Read, r: int) -> Tensor:
        part, mask = read.part, read.mask()
        heads, n = part.size
        slots = range(n) if mask is None else mask[0, r].nonzero().flatten().tolist()
        keys, values = part.k[:, slots].clone(), part.v[:, slots].clone()
        if int(read.q_positions[r]) >= read.span.request.prompt_len:
            for side, rows in zip(SIDES, (keys, values)):
                size = self.cuts[side].rows
                for at in range(0, self.cuts[side].sealed(len(slots) - 1), size):
                    for head in range(heads):
                        rows[head, at : at + size] = self.rounder(side, rows[head, at : at + size].clone())
        q = read.q[r].view(heads, -1, read.q.shape[-1])  # [h, G, D]
        weights = (q @ keys.transpose(1, 2) * read.scale).softmax(-1)
        return (weights @ values).reshape(-1, read.q.shape[-1])


def through(format: BlockFormat) -> Rounder:
    """What a format makes of a block by itself."""

    def rounder(side: int, rows: Tensor) -> Tensor:
        shape = KVShape(1, rows.shape[1], rows.dtype)
        return format.open(side, format.seal(side, rows[None]), shape)[0]

    return rounder


def by_hand(bits: int, group: int, by_channel: Sequence[bool] = (True, False)) -> Rounder:
    """Number by number: `group` rows of a channel, or `group` channels of a row, share their levels."""

    def rounder(side: int, rows: Tensor) -> Tensor:
        lines = rows.T if by_channel[side] else rows
        out = torch.empty_like(lines)
        for i, line in enumerate(lines):
            for at in range(0, len(line), group):
                some = line[at : at + group]
                low = some.min().half()
                step = ((some.max() - low.to(some.dtype)) / (2**bits - 1)).half()
                for j, number in enumerate(some):
                    scaled = (number - low.to(some.dtype)) / step.to(some.dtype) if float(step) > 0 else number * 0
                    level = scaled.round().clamp(0, 2**bits - 1)
                    out[i, at + j] = level * step.to(some.dtype) + low.to(some.dtype)
        return out.T if by_channel[side] else out

    return rounder
