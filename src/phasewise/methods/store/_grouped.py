"""Groups of numbers in few bits each: the form that KIVI and GEAR share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd

import torch
from torch import Tensor

from phasewise.errors import UserError
from phasewise.kv.format import SIDES, BlockCut, BlockFormat, Kind, KVShape, Packing, Raw
from phasewise.ops.packing import by, dequantise, pack, packed, quantise, unpack


class _Packed(Raw):
    exactness = "quantised"


@dataclass(frozen=True)
class Grouped(_Packed, BlockFormat):
    """Blocks of keys and of values as `cuts` say. Where `by_channel` [keys, values], a line is what a block has of one
    channel, else what it has of one token; `group` consecutive numbers of a line share their levels, or all of a line
    that has fewer. Planes: steps and lowest levels float16, levels.
    """

    bits: int
    group: int
    cuts: tuple[BlockCut, BlockCut]
    by_channel: tuple[bool, bool] = (True, False)

    def kinds(self, side: int, shape: KVShape) -> list[Kind]:
        lines, along, each = self.form(side, shape.dim)
        if along % each:
            fix = self._near(shape.dim)
            raise UserError(f"group={self.group} does not divide the {along} numbers of a line: choose {fix}")
        ends = ((lines, along // each), torch.float16)
        return [ends, ends, ((lines, packed(along, self.bits)), torch.uint8)]

    def _near(self, dim: int) -> str:
        """The nearest groups, below and above, that divide the lines of keys and of values."""
        common = gcd(*(self.form(side, dim)[1] for side in SIDES))
        fit = [n for n in range(1, common + 1) if common % n == 0]
        below, above = [n for n in fit if n < self.group], [n for n in fit if n > self.group]
        return " or ".join(str(n) for n in (*below[-1:], *above[:1]))

    def packings(self, dim: int) -> tuple[Packing, Packing] | None:
        if self.by_channel != (True, False):  # what kernels read
            return None
        keys, values = (Packing(self.bits, self.form(side, dim)[2]) for side in SIDES)
        return keys, values

    def seal(self, side: int, x: Tensor) -> Sequence[Tensor]:
        return self.shrink(side, self.lines(side, x))

    def open(self, side: int, planes: Sequence[Tensor], shape: KVShape) -> Tensor:
        return self.rows(side, self.expand(side, planes, shape.dim, shape.dtype))

    def form(self, side: int, dim: int) -> tuple[int, int, int]:
        """Lines of a block, numbers of a line, and how many of these share their levels."""
        rows = self.cuts[side].rows
        lines, along = (dim, rows) if self.by_channel[side] else (rows, dim)
        return lines, along, min(self.group, along)

    def lines(self, side: int, x: Tensor) -> Tensor:
        """Rows [h, blocks * rows, D] -> [h, blocks, lines, along]."""
        rows = self.cuts[side].rows
        blocks = x.reshape(x.shape[0], x.shape[1] // rows, rows, x.shape[2])
        return blocks.transpose(2, 3) if self.by_channel[side] else blocks

    def rows(self, side: int, lines: Tensor) -> Tensor:
        """The inverse of `lines`."""
        return (lines.transpose(2, 3) if self.by_channel[side] else lines).flatten(1, 2)

    def shrink(self, side: int, lines: Tensor) -> list[Tensor]:
        """Lines [h, blocks, lines, along] -> planes."""
        each = min(self.group, lines.shape[-1])
        levels, step, low = quantise(by(lines, each), self.bits)
        return [step, low, pack(levels.flatten(-2), self.bits)]

    def expand(self, side: int, planes: Sequence[Tensor], dim: int, dtype: torch.dtype) -> Tensor:
        """The lines that planes stand for."""
        step, low, data = planes
        _, along, each = self.form(side, dim)
        levels = by(unpack(data, along, self.bits), each)
        return dequantise(levels, step, low, dtype).flatten(-2)
