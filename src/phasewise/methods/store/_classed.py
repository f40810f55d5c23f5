"""Blocks of rows in two classes of so many bits, rounded row by row with the channels brought to one scale, or keys
channel by channel: what ZipCache makes of rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor

from phasewise.kv.format import KEYS, SIDES, BlockCut, BlockFormat, Classes, Kind, KVShape, Raw
from phasewise.ops.packing import LARGEST, dequantise, pack, packed, quantise, unpack

IMPORTANT = 2.0  # the saliency of important rows is at least this, that of others at most 1
ENDS = 32  # bits of the two ends that a key channel has in one class of a block


class _Packed(Raw):
    exactness = "quantised"


@dataclass(frozen=True)
class Classed(_Packed, BlockFormat):
    """Blocks of `rows` rows, of all heads of a layer together. Of rows sealed together, `upper` for each block are kept
    in `high` bits a number, the others in `low`: those of the largest saliency, of equal ones the earlier. They lie in
    their class in the order of the text, whichever block that puts them in, so that no place of a class stays empty.

    A row's levels lie evenly between its smallest and its largest number, once every channel has been divided by what
    is settled for it: the root of its largest magnitude in the prompt. Planes: which rows are in the upper class, a bit
    each; then of either class steps and lowest levels float16, and levels.

    With `by_channel` the keys' levels lie evenly between the smallest and the largest number that one channel has among
    the rows that a block's share of a class holds: a step and a lowest level for each channel, and nothing is settled.
    """

    by_saliency: ClassVar[bool] = True

    high: int
    low: int
    rows: int
    upper: int
    by_channel: bool = False
    cuts: tuple[BlockCut, BlockCut] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "cuts", (BlockCut(self.rows), BlockCut(self.rows)))

    def packings(self, dim: int) -> tuple[Classes, Classes]:
        keys, values = (Classes((self.high, self.low), self.channelwise(side)) for side in SIDES)
        return keys, values

    def channelwise(self, side: int) -> bool:
        """Returns True if the levels of keys, or values, are those of channels."""
        return self.by_channel and side == KEYS

    @property
    def classes(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Rows of a block and bits of their numbers."""
        return (self.upper, self.high), (self.rows - self.upper, self.low)

    def kinds(self, side: int, shape: KVShape) -> list[Kind]:
        found: list[Kind] = [((packed(self.rows, 1),), torch.uint8)]
        for count, bits in self.classes:
            ends = (min(count, 1) * shape.dim if self.channelwise(side) else count,), torch.float16
            found += [ends, ends, ((count, packed(shape.dim, bits)), torch.uint8)]
        return found

    def settled(self, side: int, shape: KVShape) -> list[Kind]:
        return [] if self.channelwise(side) else [((shape.dim,), torch.float16)]

    def settle(self, side: int, x: Tensor) -> Sequence[Tensor]:
        if self.channelwise(side):
            return []
        root = x.abs().amax(1).float().sqrt().flatten()[None]
        scale = root.where(root > 0, 1).clamp(torch.finfo(torch.float16).tiny, LARGEST)
        return [scale.to(torch.float16)]

    def seal(self, side: int, x: Tensor) -> Sequence[Tensor]:
        raise NotImplementedError("what becomes of a row hangs on how much it matters: see `seal_ranked`")

    def seal_ranked(self, side: int, x: Tensor, saliency: Tensor, settled: Sequence[Tensor]) -> Sequence[Tensor]:
        lead, n, blocks = saliency.shape[:-1] or (1,), saliency.shape[-1], saliency.shape[-1] // self.rows
        even = x.transpose(-3, -2).flatten(-2).float()  # [L, n, h * D]
        even = even if self.channelwise(side) else even / settled[0].float()
        even = even.view(*lead, n, even.shape[-1])
        best = saliency.view(*lead, n).sort(descending=True, stable=True).indices[..., : blocks * self.upper]
        chosen = torch.zeros((*lead, n), dtype=torch.bool, device=x.device).scatter_(-1, best, True)
        planes = [pack(chosen.view(*lead, blocks, self.rows).to(torch.uint8), 1)]
        order = chosen.sort(descending=True, stable=True).indices  # the upper class, then the other
        order = order + torch.arange(len(order), device=x.device)[:, None] * n
        apart = even.flatten(0, 1).index_select(0, order.flatten()).view_as(even)
        for rows, (count, bits) in zip(torch.split(apart, [best.shape[-1], n - best.shape[-1]], 1), self.classes):
            own = rows.reshape(*lead, blocks, count, even.shape[-1])
            if self.channelwise(side):
                levels, step, low = _by_channel(own, bits)
            else:
                levels, step, low = quantise(own, bits)
            planes += [step, low, pack(levels, bits)]
        return planes

    def open(self, side: int, planes: Sequence[Tensor], shape: KVShape) -> Tensor:
        which, *each = planes
        chosen, width = unpack(which, self.rows, 1).bool().flatten(), shape.heads * shape.dim
        wide = torch.promote_types(shape.dtype, torch.float32)
        even = torch.empty((len(chosen), width), dtype=wide, device=which.device)
        for at, (mine, (_, bits)) in enumerate(zip((chosen, ~chosen), self.classes)):
            step, low, data = each[3 * at : 3 * at + 3]
            levels = unpack(data, width, bits)
            if not self.channelwise(side):
                even[mine] = dequantise(levels, step, low, wide).flatten(0, 2)
            elif levels.shape[-2]:
                even[mine] = dequantise(levels.mT, step, low, wide).mT.flatten(0, 2)
        rows = (even if self.channelwise(side) else even * each[-1][0].to(wide)).to(shape.dtype)
        return rows.view(len(chosen), shape.heads, shape.dim).transpose(0, 1)


@dataclass(frozen=True)
class FittedClasses(Classed):
    """`Classed`, of which a layer has as many rows in the upper class as its prompt has important ones: those whose
    saliency is at least `IMPORTANT`."""

    by_prompt: ClassVar[bool] = True

    def fit(self, saliency: Tensor) -> int:
        share = int((saliency >= IMPORTANT).sum()) / len(saliency)
        upper = max(1, -int(-share * self.rows // 1))
        saved = (self.rows - upper) * (self.high - self.low)  # bits of one channel of keys
        return upper if 2 * saved > ENDS else self.rows  # values save as much, and have no ends by class

    def fitted(self, fit: int) -> FittedClasses:
        return replace(self, upper=fit)


def _by_channel(rows: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rows [..., n, W] -> levels uint8 [..., n, W], and of each channel the step and the lowest level, float16
    [..., W]; of no rows, [..., 0]."""
    if not rows.shape[-2]:
        none = rows.new_empty((*rows.shape[:-2], 0), dtype=torch.float16)
        return rows.to(torch.uint8), none, none
    levels, step, low = quantise(rows.mT, bits)
    return levels.mT, step, low
