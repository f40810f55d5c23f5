"""Sealed blocks as native kernels read them: packed, where a codec says as data how its planes lie (`Packing`).

Left out: float32, and blocks that lie in any other way: these are opened in front of the kernels (`Sealed.opened`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, overload

import torch
from torch import Tensor

from phasewise.ops.native.abi import SidesStruct
from phasewise.ops.native.sealing import Sealing, Seals, fits
from phasewise.ops.native.spans import SecondClass, Side, opens

if TYPE_CHECKING:
    from phasewise.kv.blocks import BlockCodec, Sealed
    from phasewise.kv.buffer import KVShape
    from phasewise.kv.layer_kv import LayerKV


@dataclass(frozen=True, slots=True)
class Packing:
    """The planes of a side are step and low, float16 [h, blocks, lines, groups], and levels uint8 [h, blocks, lines,
    bytes] as `ops/packing.py` makes them: of keys a line is what a block has of one channel, of values what it has of
    one row. Before these may lie what is added to them: the thin matrices of a product of this `rank`, float16 [h,
    blocks, rows, rank] and [h, blocks, D, rank], and numbers `apart` of each line, float16 [h, blocks, lines, apart],
    with their places int16."""

    bits: int
    group: int
    rank: int = 0
    apart: int = 0

    def side(self, planes: Sequence[Tensor], slots: int, rows: int) -> Side:
        """What kernels read of the first `slots` rows."""
        *more, step, low, levels = planes
        thin, apart = more[:2] if self.rank else (), more[-2:] if self.apart else ()
        return Side(levels, step, low, slots, rows, self.bits, self.group, thin, apart)

    def fits(self, rows: int, dim: int) -> bool:
        """Whether kernels read blocks of so many rows, of heads of so many numbers."""
        return opens(self.bits, self.group, rows, dim, self.rank, self.apart)


@dataclass(frozen=True, slots=True)
class Classes:
    """The same of a side whose rows are of two classes, of so many `bits` [upper, lower] a number, all heads together:
    the planes [1, blocks, ...] are bits that say which rows are of the upper one, and of either class step and low,
    float16 for each row, and levels; what is settled are the scales of channels."""

    bits: tuple[int, int]

    def side(self, planes: Sequence[Tensor], slots: int, rows: int) -> Side:
        upper, step, low, levels, *others, scale = planes
        rest = SecondClass(upper, scale, others[2], others[0], others[1], self.bits[1])
        return Side(levels, step, low, slots, rows, self.bits[0], 8 * levels.shape[-1] // self.bits[0], rest=rest)

    def fits(self, rows: int, dim: int) -> bool:
        return all(bits in (2, 4, 8) for bits in self.bits) and opens(2, 32, 8, dim)


@dataclass(slots=True)
class PackedBlocks:
    """What a kernel reads of sealed blocks, and the rows as they were made, `tail` [h, R, D] each, that begin with row
    `base`."""

    sides: tuple[Side, Side]
    tail: Sequence[Tensor]
    base: int


class Later(Sequence[Tensor]):
    """Planes that are made when one of them is first looked at."""

    __slots__ = ("_made", "_make")

    def __init__(self, make: Callable[[], Sequence[Tensor]]) -> None:
        self._make, self._made = make, list[Tensor]()

    @overload
    def __getitem__(self, which: int) -> Tensor: ...

    @overload
    def __getitem__(self, which: slice) -> Sequence[Tensor]: ...

    def __getitem__(self, which: int | slice) -> Tensor | Sequence[Tensor]:
        self._made = self._made or list(self._make())
        return self._made[which]

    def __len__(self) -> int:
        return len(self[:])


def packings(codec: BlockCodec, shape: KVShape) -> tuple[Packing | Classes, Packing | Classes] | None:
    """How the planes of keys and values lie, if native kernels read them like that."""
    found = codec.packings(shape.dim)
    if found is None or shape.dtype != torch.bfloat16 or shape.device != "cpu":
        return None
    (keys, values), rows = found, codec.cuts[0].rows
    return found if keys.fits(rows, shape.dim) and values.fits(8, shape.dim) else None


def lying(
    sealed: Sealed, planes: Sequence[Tensor], base: int, rows: tuple[int, int]
) -> tuple[Sequence[Tensor], PackedBlocks | None]:
    """What `rows`, (committed, of this step), read with the blocks that there are: opened when looked at, and packed.
    `planes` hold those from row `base` on as they were made."""
    n, fresh = rows
    tail = [plane[:, : n + fresh - base] for plane in planes]
    opened = Later(partial(sealed.opened, tail, base, n + fresh))
    return opened, packed(sealed, tail, base, n, [sealed.rows(side) for side in range(len(tail))])


LayerMarks = Callable[[int, int, int], Tensor]  # (layer, start, stop): `Marks` (kv/blocks.py) of each layer
Tail = tuple["Sealed", Sequence[Tensor], int]  # of a layer; its rows as they were made, from the last of these on


def seals(tails: Sequence[Tail], side: int) -> Seals | None:
    """Where a kernel finds what it may seal, if it does."""
    first, planes, _ = tails[0]
    packing = None if first.packings is None else first.packings[side]
    if not isinstance(packing, Packing) or packing.rank or packing.apart or not fits(planes[side]):
        return None
    found, size = list[Sealing](), first.codec.cuts[side].rows
    for sealed, own, base in tails:
        step, low, levels = sealed.buffers[side].planes
        found.append(Sealing(own[side], levels, step, low, 0, size, base))
    return Seals(found, side == 0, packing.bits, packing.group)


def fill(
    tails: Sequence[Tail], side: int, start: int, stop: int, found: Seals | None = None, marks: LayerMarks | None = None
) -> int:
    """Seal the blocks `start` .. `stop` of layers that have sealed as many, in a call for all of them, as most of what
    few rows take is the call. They are not counted yet. -> bytes moved"""
    first, moved = tails[0][0], 0
    if stop <= start:
        return 0
    assert first.buffers[side].refs == 1 and stop <= first.buffers[side].cap, "room is made before a step"
    size, blocks = first.codec.cuts[side].rows, slice(start, stop)
    found = found or seals(tails, side)
    if found is not None:
        found((stop - start) * size, start * size, start)
        return len(tails) * sum(plane[:, blocks].nbytes for plane in first.buffers[side].planes)
    rows = [planes[side][:, start * size - base : stop * size - base] for _, planes, base in tails]
    if first.marked is None:
        planes = first.codec.seal(side, torch.cat(rows))
    else:
        assert marks is not None, "who seals rows with marks gives them"
        own = torch.stack([marks(layer, start * size, stop * size) for layer in range(len(tails))])
        settled = [torch.cat(each) for each in zip(*(sealed.settled[side].planes for sealed, _, _ in tails))]
        planes = first.marked.classed(side, torch.stack(rows), own, settled)
    for which, made in enumerate(planes):
        moved += made.nbytes
        for (sealed, _, _), new in zip(tails, torch.split(made, first.form.heads)):
            sealed.buffers[side].planes[which][:, blocks] = new
    return moved


def seal_full(
    tails: Sequence[Tail], n: int, found: Sequence[Seals | None] = (None, None), marks: LayerMarks | None = None
) -> int:
    """Seal what `n` committed rows fill; blocks that want marks wait for them. -> bytes moved"""
    first, moved = tails[0][0], 0
    for side, cut in enumerate(first.codec.cuts):
        start, stop = first.counts[side], cut.blocks(n)
        if start < stop and (first.marked is None or marks is not None):
            moved += fill(tails, side, start, stop, found[side], marks)
            for sealed, _, _ in tails:
                sealed.counts[side] = stop
    return moved


def ahead(tails: Sequence[Tail], upto: Sequence[int]) -> None:
    """Seal the first `upto` [keys, values] rows, which are committed, without counting the blocks: rows of this step
    may read more than is sealed. Room for what a step's rows fill was made with theirs."""
    first = tails[0][0]
    for side, cut in enumerate(first.codec.cuts):
        fill(tails, side, first.counts[side], upto[side] // cut.rows)


def packed(
    sealed: Sealed, tail: Sequence[Tensor], base: int, n: int, upto: Sequence[int], after: Sequence[int] = ()
) -> PackedBlocks | None:
    """The first `upto` [keys, values] rows as if they were sealed, as they are or `ahead`: of the `n` committed ones,
    and then of those at the slots `after`. None: blocks have to be opened."""
    if sealed.packings is None:
        return None
    sides = []
    for side, (packing, cut) in enumerate(zip(sealed.packings, sealed.codec.cuts)):
        planes = sealed.lying(side)
        if upto[side] > n:
            done = sealed.rows(side)
            index = torch.tensor([*range(done, n), *after[: upto[side] - n]]) - base
            more = sealed.codec.seal(side, tail[side][:, index])
            planes = [torch.cat((p[:, : sealed.counts[side]], new), 1) for p, new in zip(planes, more)]
        sides.append(packing.side(planes, upto[side], cut.rows))
    return PackedBlocks((sides[0], sides[1]), tail, base)


def seal_alike(layers: Sequence[LayerKV], marks: LayerMarks | None = None) -> int | None:
    """Seal what committed rows fill, as `LayerKV.seal` of each layer does, where all have sealed blocks already,
    equally many, that native kernels read. -> bytes moved; None: it is not so, and nothing was done."""
    tails = [
        (layer.sealed, layer.slabs[0].buffer.planes, layer.slabs[0].base)
        for layer in layers
        if layer.sealed is not None and len(layer.slabs) == 1
    ]
    if len(tails) < len(layers) or not alike([sealed for sealed, _, _ in tails]):
        return None
    n = layers[0].n
    return None if any(layer.n != n for layer in layers) else seal_full(tails, n, marks=marks)


def alike(layers: Sequence[Sealed]) -> bool:
    """Whether all have sealed blocks, equally many, that native kernels read."""
    return all(each.active and each.packings is not None and each.counts == layers[0].counts for each in layers)


def sides_struct(sealed: Sealed) -> SidesStruct:
    """What is sealed now, as native steps take it."""
    assert sealed.packings is not None
    keys, values = (
        packing.side(sealed.lying(side), sealed.rows(side), cut.rows).struct
        for side, (packing, cut) in enumerate(zip(sealed.packings, sealed.codec.cuts))
    )
    return SidesStruct(keys=keys, values=values)
