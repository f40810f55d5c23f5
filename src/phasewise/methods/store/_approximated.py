"""Blocks in few bits, what these miss as a product of thin matrices, and outliers apart: what GEAR makes of rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from phasewise.errors import UserError
from phasewise.kv.format import SIDES, Kind, KVShape, Packing
from phasewise.methods.store._grouped import Grouped
from phasewise.ops.packing import LARGEST

ROUNDS = 3  # of power iteration


@dataclass(frozen=True)
class Approximated(Grouped):
    """Planes before those of `Grouped`: the thin matrices [rows, rank] and [D, rank], outliers [lines, 2 * k], all
    float16, and their places int16. What is not wanted has no planes."""

    rank: int = 4
    sparse: float = 0.02
    rounds: int = ROUNDS

    def outliers(self, along: int) -> int:
        """On either side of a line of so many numbers."""
        return max(1, round(self.sparse * along / 2)) if self.sparse else 0

    def kinds(self, side: int, shape: KVShape) -> list[Kind]:
        rows, dim = self.cuts[side].rows, shape.dim
        lines, along, _ = self.form(side, dim)
        k = self.outliers(along)
        if self.rank > min(rows, dim):
            raise UserError(f"rank={self.rank} is more than blocks of {rows} x {dim} have: choose {min(rows, dim)}")
        if 2 * k > along:
            raise UserError(f"sparse={self.sparse} leaves nothing of a line of {along} numbers: choose less, or 0")
        half = torch.float16
        found: list[Kind] = [((rows, self.rank), half), ((dim, self.rank), half)] if self.rank else []
        found += [((lines, 2 * k), half), ((lines, 2 * k), torch.int16)] if k else []
        return [*found, *super().kinds(side, shape)]

    def packings(self, dim: int) -> tuple[Packing, Packing] | None:
        bare = super().packings(dim)
        if bare is None:
            return None
        apart = (2 * self.outliers(self.form(side, dim)[1]) for side in SIDES)
        keys, values = (replace(each, rank=self.rank, apart=count) for each, count in zip(bare, apart))
        return keys, values

    def seal(self, side: int, x: Tensor) -> Sequence[Tensor]:
        x = x.float()
        lines = self.lines(side, x)
        apart: list[Tensor] = []
        if k := self.outliers(lines.shape[-1]):
            lines, apart = _without_outliers(lines, k)
        planes = self.shrink(side, lines)
        thin: list[Tensor] = []
        if self.rank:
            missed = lines - self.expand(side, planes, x.shape[2], x.dtype)
            blocks = missed.transpose(2, 3) if self.by_channel[side] else missed
            thin = list(map(_half, approximation(blocks, self.rank, self.rounds)))
        return [*thin, *apart, *planes]

    def open(self, side: int, planes: Sequence[Tensor], shape: KVShape) -> Tensor:
        wide = torch.promote_types(shape.dtype, torch.float32)
        *extra, step, low, data = planes
        lines = self.expand(side, (step, low, data), shape.dim, wide)
        if self.sparse:
            values, index = extra[-2:]
            lines = lines.scatter_add(-1, index.long(), values.to(wide))
        blocks = lines.transpose(2, 3) if self.by_channel[side] else lines
        if self.rank:
            left, right = extra[:2]
            blocks = blocks + left.to(wide) @ right.to(wide).transpose(2, 3)
        return blocks.flatten(1, 2).to(shape.dtype)


def approximation(x: Tensor, rank: int, rounds: int = ROUNDS) -> tuple[Tensor, Tensor]:
    """Matrices [..., n, d] -> left [..., n, rank] with orthonormal columns and right [..., d, rank], the product of
    which is next to the best of that rank. Every matrix starts from the same random directions."""
    start = torch.randn(x.shape[-1], rank, generator=torch.Generator().manual_seed(rank))
    right = torch.linalg.qr(start.to(x))[0].expand(*x.shape[:-2], -1, -1)
    for turn in range(rounds):
        left = torch.linalg.qr(x @ right)[0]
        right = x.transpose(-1, -2) @ left
        if turn < rounds - 1:
            right = torch.linalg.qr(right)[0]
    return left, right


def _without_outliers(lines: Tensor, k: int) -> tuple[Tensor, list[Tensor]]:
    """Lines with their `k` largest and smallest numbers replaced by the line's mean; what was replaced lies so far from
    it, float16 [..., 2 * k], at these places."""
    index = torch.cat((lines.topk(k, -1).indices, lines.topk(k, -1, largest=False).indices), -1)
    mean = lines.mean(-1, keepdim=True).expand_as(index)
    values = _half(lines.gather(-1, index) - mean)
    twice = index[..., :k, None] == index[..., None, k:]  # a line whose numbers are all alike
    values[..., k:].masked_fill_(twice.any(-2), 0)
    return lines.scatter(-1, index, mean), [values, index.to(torch.int16)]


def _half(x: Tensor) -> Tensor:
    return x.clamp(-LARGEST, LARGEST).to(torch.float16, memory_format=torch.contiguous_format)
