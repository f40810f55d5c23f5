"""The quantised blocks of a layer, in front of a tail of rows as the model made them.

A row of a prompt reads all rows as they were made. Any later row reads as sealed what is sealed when just the rows that
it sees have been there before it: so the form in which it reads depends on how many these are and on nothing else, and
chunks, drafts, replays, prefix hits and hand-offs give the same numbers. Blocks are sealed when a prompt is complete,
and then one by one as they fill; keys and values have cuts of their own.

Where blocks depend on how much their rows matter as well (`BlockFormat.by_saliency`), no step has rows on both sides of
a boundary. Native kernels read blocks as they are kept, where the format says as data how its planes lie (`Packing`).

Left out: eviction from sealed blocks, and heads or layers that keep different rows. Prefix blocks hold rows as they
were made, and so does a prompt that leaves for another engine until it has arrived there. Blocks in float32, and those
that lie in any other way, are opened in front of the kernels (`LayerBlocks.opened`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, overload

import torch
from torch import Tensor

from phasewise.kv.buffer import Buffer, Ledger
from phasewise.kv.format import (
    SIDES,
    BlockFormat,
    KVShape,
    Packing,
    Raw,
    RowFormat,
    block_bytes,
    block_format,
    form_of,
    packings,
    settled_bytes,
)
from phasewise.ops.native.abi import SidesStruct
from phasewise.ops.native.sealing import Sealing, Seals, fits
from phasewise.ops.native.spans import Side

if TYPE_CHECKING:
    from phasewise.kv.layer_kv import LayerKV

SLACK = 32  # rows of the tail's buffer beyond the longest tail, at least: it is moved once in so many rows

RowSaliency = Callable[[int, int], Tensor]
"""(start, stop) -> how much the rows start .. stop - 1 of a layer matter, [stop - start]."""
LayerSaliency = Callable[[int, int, int], Tensor]
"""(layer, start, stop) -> the same of each layer."""


class LayerBlocks:
    """The sealed blocks of one layer, [keys, values]: `counts` of them in `buffers`, which are taken ahead, when room
    for rows is made, and what is `settled` for formats by saliency. `active` once the prompt is complete, and then the
    format may be fitted to it (`BlockFormat.fit`). Forks share the buffers until either side makes room, and what is
    settled for good."""

    __slots__ = (
        "active", "buffers", "counts", "fit", "form", "format", "ledger", "packings", "raw", "settled", "shape",
    )  # fmt: skip

    def __init__(self, format: BlockFormat, shape: KVShape, ledger: Ledger, rows: int) -> None:
        self.format, self.shape, self.ledger = format, shape, ledger
        self.raw, self.form, self.packings = Raw(), form_of(format, shape), packings(format, shape)
        self.active, self.counts, self.fit = False, [0, 0], 0
        self.buffers = [self._buffer(side, format.cuts[side].blocks(rows)) for side in SIDES]
        self.settled: list[Buffer] = []
        if format.by_saliency:
            self.settled = [Buffer(format.settled(side, self.form), 1, 1, ledger, shape.device) for side in SIDES]

    @classmethod
    def of(cls, format: RowFormat, shape: KVShape, ledger: Ledger, rows: int) -> LayerBlocks | None:
        """With room for the blocks of so many rows; None for a format without blocks."""
        blocks = block_format(format)
        return None if blocks is None else cls(blocks, shape, ledger, rows)

    def _buffer(self, side: int, blocks: int) -> Buffer:
        return Buffer(self.format.kinds(side, self.form), self.form.heads, blocks, self.ledger, self.form.device)

    # ---- sizes
    def rows(self, side: int) -> int:
        """Rows in sealed blocks."""
        return self.counts[side] * self.format.cuts[side].rows

    @property
    def first(self) -> int:
        """The first row that is needed as it was made."""
        return min(map(self.rows, SIDES))

    @property
    def longest(self) -> int:
        """The longest tail there may be between two steps."""
        return max(cut.last(0) for cut in self.format.cuts)

    @property
    def held(self) -> list[Buffer]:
        """All of them."""
        return [*self.buffers, *self.settled]

    @property
    def bytes(self) -> int:
        return sum(buffer.bytes for buffer in self.held)

    def live_bytes(self, n: int) -> int:
        """Returns the bytes of all `n` rows, sealed or not."""
        return sum(self._bytes(side, self.rows(side), n, self.active) for side in SIDES)

    def read_bytes(self, upto: Sequence[int], n: int) -> int:
        """Returns the bytes that reading `n` rows takes with the first `upto` [keys, values] of them sealed."""
        return sum(self._bytes(side, upto[side], n, upto[side] > 0) for side in SIDES)

    def _bytes(self, side: int, sealed: int, n: int, settled: bool) -> int:
        blocks = sealed // self.format.cuts[side].rows * block_bytes(self.format, self.form, side)
        blocks += settled_bytes(self.format, self.form, side) if settled else 0
        raw = (n - sealed) * self.shape.dim * self.shape.dtype.itemsize
        return self.form.heads * blocks + self.shape.heads * raw

    def spare(self, n: int) -> int:
        """Rows that may come after `n` before more room is needed."""
        if any(buffer.refs > 1 for buffer in self.buffers):
            return 0
        return min(cut.last(buffer.cap) for cut, buffer in zip(self.format.cuts, self.buffers)) - n

    # ---- room
    def _wanted(self, n: int, roomy: int) -> Iterator[tuple[int, int]]:
        """(side, blocks) of the buffers that do not do for `n` rows; new ones are for `roomy` rows."""
        for side, (cut, buffer) in enumerate(zip(self.format.cuts, self.buffers)):
            if cut.blocks(n) > buffer.cap or buffer.refs > 1:
                yield side, max(cut.blocks(roomy), buffer.cap)

    def growth(self, n: int, roomy: int) -> int:
        """Bytes that `reserve` would add to the ledger."""
        total = 0
        for side, blocks in self._wanted(n, roomy):
            total += blocks * self.form.heads * block_bytes(self.format, self.form, side)
            total -= self.buffers[side].bytes if self.buffers[side].refs == 1 else 0
        return total

    def reserve(self, n: int, roomy: int) -> int:
        """Make room for the blocks of `n` rows and stop sharing. Returns bytes copied."""
        moved = 0
        for side, blocks in list(self._wanted(n, roomy)):
            old, new = self.buffers[side], self._buffer(side, blocks)
            moved += self._copy(new, old.planes, self.counts[side])
            old.drop()
            self.buffers[side] = new
        return moved

    @staticmethod
    def _copy(new: Buffer, planes: Sequence[Tensor], count: int) -> int:
        for a, b in zip(new.planes, planes):
            a[:, :count] = b[:, :count]
        return sum(a[:, :count].nbytes for a in new.planes)

    # ---- sealing
    def take(self, planes: Sequence[Tensor], base: int, n: int, saliency: RowSaliency | None = None) -> int:
        """Seal what `n` rows fill; `planes` hold those from row `base` on as they were made, and the first time these
        are all of the prompt. Returns bytes written."""
        moved = 0 if self.active else self._settle(planes, n)
        if not self.active and self.format.by_prompt:
            assert saliency is not None, "who seals rows by saliency says how much they matter"
            self._fit(self.format.fit(saliency(0, min(cut.sealed(n) for cut in self.format.cuts) or n)))
        self.active = True
        for side, cut in enumerate(self.format.cuts):
            start, stop = self.counts[side], cut.blocks(n)
            if start == stop:
                continue
            buffer = self.buffers[side]
            assert buffer.refs == 1 and stop <= buffer.cap, "room is made before a step"
            rows = planes[side][:, start * cut.rows - base : stop * cut.rows - base]
            if not self.format.by_saliency:
                made = self.format.seal(side, rows)
            else:
                assert saliency is not None, "who seals rows by saliency says how much they matter"
                own = saliency(start * cut.rows, stop * cut.rows)
                made = self.format.seal_ranked(side, rows, own, self.settled[side].planes)
            for plane, new in zip(buffer.planes, made):
                plane[:, start:stop] = new
                moved += new.nbytes
            self.counts[side] = stop
        return moved

    def _settle(self, planes: Sequence[Tensor], n: int) -> int:
        """Forks that share what is settled have the same prompt. Returns bytes written."""
        moved = 0
        for side, buffer in enumerate(self.settled):
            for plane, new in zip(buffer.planes, self.format.settle(side, planes[side][:, :n])):
                plane[:, 0] = new
                moved += new.nbytes
        return moved

    def _fit(self, fit: int) -> None:
        """From now on blocks have the format that is fitted to this prompt; there are none yet."""
        self.fit = fit
        if fit:
            self.format = self.format.fitted(fit)
            for side, old in enumerate(self.buffers):
                old.drop()  # before there is another: the budget may have no room for both
                self.buffers[side] = self._buffer(side, old.cap)

    def boundary(self, n: int) -> int | None:
        """The position of the first row that finds other blocks than one at `n` does, where rows of one step must not;
        None: they may."""
        if not self.format.by_saliency:
            return None
        return min(cut.last(cut.blocks(n)) for cut in self.format.cuts) + 1

    # ---- reading
    def planes(self, side: int) -> list[Tensor]:
        """The planes of a side's blocks, and those of what is settled."""
        return [*self.buffers[side].planes, *(self.settled[side].planes if self.settled else ())]

    def opened(self, planes: Sequence[Tensor], base: int, n: int) -> list[Tensor]:
        """Keys and values [h, n, D]: blocks opened, and behind them the rows of `planes`, which begin with `base`."""
        found = []
        for side, plane in enumerate(planes):
            sealed = self.rows(side)
            if not sealed:
                found.append(plane[:, : n - base])
                continue
            whole = plane.new_empty((plane.shape[0], n, plane.shape[2]))
            packed = [p[:, : self.counts[side]] for p in self.planes(side)]  # of what is settled there is one
            whole[:, :sealed] = self.format.open(side, packed, self.shape)
            whole[:, sealed:] = plane[:, sealed - base : n - base]
            found.append(whole)
        return found

    def formed(self, side: int, rows: Tensor, upto: int, n: int, after: Sequence[int]) -> Tensor:
        """Returns `rows` [h, N, D], which `opened` gave, with the first `upto` of them as if they were sealed: of the
        `n` committed ones, and then of those at the slots `after`."""
        done = self.rows(side)
        if upto <= done:
            return rows
        index = torch.tensor([*range(done, min(n, upto)), *after[: max(0, upto - n)]], device=rows.device)
        whole = rows.clone()
        whole[:, index] = self.format.open(side, self.format.seal(side, rows[:, index]), self.shape)
        return whole

    # ---- between steps
    def dump(self) -> dict[str, object]:
        """Returns what `load` takes: plain data and tensors."""
        kept = [[p[:, :count].clone() for p in b.planes] for b, count in zip(self.buffers, self.counts)]
        settled = [[p.clone() for p in buffer.planes] for buffer in self.settled]
        return {"counts": list(self.counts), "planes": kept, "settled": settled, "fit": self.fit}

    def load(
        self, counts: Sequence[int], planes: Sequence[Sequence[Tensor]], settled: Sequence[Sequence[Tensor]], fit: int
    ) -> int:
        """Fill an empty one, which then is active. Returns bytes copied."""
        self._fit(fit)
        self.counts, self.active = list(counts), True
        moved = sum(self._copy(buffer, planes, 1) for buffer, planes in zip(self.settled, settled))
        return moved + sum(self._copy(self.buffers[side], planes[side], counts[side]) for side in SIDES)

    def fork(self) -> LayerBlocks:
        twin = object.__new__(LayerBlocks)
        twin.format, twin.shape, twin.ledger, twin.raw = self.format, self.shape, self.ledger, self.raw
        twin.form, twin.packings = self.form, self.packings
        twin.active, twin.counts, twin.fit = self.active, list(self.counts), self.fit
        twin.buffers = [buffer.share() for buffer in self.buffers]
        twin.settled = [buffer.share() for buffer in self.settled]
        return twin

    def close(self) -> None:
        for buffer in self.held:
            buffer.drop()
        self.buffers, self.settled = [], []


@dataclass(slots=True)
class PackedBlocks:
    """Sealed keys and values as a kernel reads them, and `tail`, keys and values [h, R, D] of the rows from `base` on
    as they were made."""

    sides: tuple[Side, Side]
    tail: Sequence[Tensor]
    base: int


class LazyPlanes(Sequence[Tensor]):
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


def lying(
    sealed: LayerBlocks, planes: Sequence[Tensor], base: int, rows: tuple[int, int]
) -> tuple[Sequence[Tensor], PackedBlocks | None]:
    """Returns what `rows`, (committed, of this step), read with the blocks that there are: planes that are opened when
    they are first looked at, and packed ones. `planes` hold the rows from `base` on as they were made."""
    n, fresh = rows
    tail = [plane[:, : n + fresh - base] for plane in planes]
    opened = LazyPlanes(partial(sealed.opened, tail, base, n + fresh))
    return opened, packed(sealed, tail, base, n, [sealed.rows(side) for side in range(len(tail))])


Tail = tuple[LayerBlocks, Sequence[Tensor], int]  # of a layer; its rows as they were made, from the last of these on


def seals(tails: Sequence[Tail], side: int) -> Seals | None:
    """Returns the addresses of what a kernel may seal; None if no kernel seals blocks of this format."""
    first, planes, _ = tails[0]
    packing = None if first.packings is None else first.packings[side]
    if not isinstance(packing, Packing) or packing.rank or packing.apart or not fits(planes[side]):
        return None
    found, size = list[Sealing](), first.format.cuts[side].rows
    for sealed, own, base in tails:
        step, low, levels = sealed.buffers[side].planes
        found.append(Sealing(own[side], levels, step, low, 0, size, base))
    return Seals(found, side == 0, packing.bits, packing.group)


def fill(
    tails: Sequence[Tail],
    side: int,
    start: int,
    stop: int,
    found: Seals | None = None,
    saliency: LayerSaliency | None = None,
) -> int:
    """Seal the blocks `start` .. `stop` of layers that have sealed as many, in a call for all of them, as most of what
    few rows take is the call. They are not counted yet. Returns bytes moved."""
    first = tails[0][0]
    if stop <= start:
        return 0
    assert first.buffers[side].refs == 1 and stop <= first.buffers[side].cap, "room is made before a step"
    size, blocks = first.format.cuts[side].rows, slice(start, stop)
    found = found or seals(tails, side)
    if found is not None:
        found((stop - start) * size, start * size, start)
        return len(tails) * sum(plane[:, blocks].nbytes for plane in first.buffers[side].planes)
    rows = [planes[side][:, start * size - base : stop * size - base] for _, planes, base in tails]
    layers = [sealed for sealed, _, _ in tails]
    if not first.format.by_saliency:
        return _put(layers, side, blocks, first.format.seal(side, torch.cat(rows)))
    assert saliency is not None, "who seals rows by saliency says how much they matter"
    matter = [saliency(layer, start * size, stop * size) for layer in range(len(tails))]
    return _put_ranked(layers, side, blocks, rows, matter)


def _put_ranked(
    layers: Sequence[LayerBlocks], side: int, blocks: slice, rows: Sequence[Tensor], saliency: Sequence[Tensor]
) -> int:
    """Seal rows of each layer by how much each of them matters, and write their blocks. Returns bytes written."""
    moved = 0
    for format in dict.fromkeys(sealed.format for sealed in layers):  # layers may be fitted unalike
        mine = [layer for layer, sealed in enumerate(layers) if sealed.format == format]
        alike = [layers[layer] for layer in mine]
        own, theirs = (torch.stack([each[layer] for layer in mine]) for each in (rows, saliency))
        settled = [torch.cat(each) for each in zip(*(sealed.settled[side].planes for sealed in alike))]
        moved += _put(alike, side, blocks, format.seal_ranked(side, own, theirs, settled))
    return moved


def _put(layers: Sequence[LayerBlocks], side: int, blocks: slice, planes: Sequence[Tensor]) -> int:
    """Write the planes of some blocks of all layers, [layers * heads, blocks, ...] each. Returns bytes written."""
    for which, made in enumerate(planes):
        for sealed, new in zip(layers, torch.split(made, layers[0].form.heads)):
            sealed.buffers[side].planes[which][:, blocks] = new
    return sum(made.nbytes for made in planes)


def seal_full(
    tails: Sequence[Tail], n: int, found: Sequence[Seals | None] = (None, None), saliency: LayerSaliency | None = None
) -> int:
    """Seal what `n` committed rows fill; blocks by saliency wait for it. Returns bytes moved."""
    first, moved = tails[0][0], 0
    for side, cut in enumerate(first.format.cuts):
        start, stop = first.counts[side], cut.blocks(n)
        if start < stop and (saliency is not None or not first.format.by_saliency):
            moved += fill(tails, side, start, stop, found[side], saliency)
            for sealed, _, _ in tails:
                sealed.counts[side] = stop
    return moved


def ahead(tails: Sequence[Tail], upto: Sequence[int]) -> None:
    """Seal the first `upto` [keys, values] rows, which are committed, without counting the blocks: rows of this step
    may read more than is sealed. Room for what a step's rows fill was made with theirs."""
    first = tails[0][0]
    for side, cut in enumerate(first.format.cuts):
        fill(tails, side, first.counts[side], upto[side] // cut.rows)


def packed(
    sealed: LayerBlocks, tail: Sequence[Tensor], base: int, n: int, upto: Sequence[int], after: Sequence[int] = ()
) -> PackedBlocks | None:
    """The first `upto` [keys, values] rows as if they were sealed, as they are or `ahead`: of the `n` committed ones,
    and then of those at the slots `after`. None: blocks have to be opened."""
    if sealed.packings is None:
        return None
    sides = []
    for side, (packing, cut) in enumerate(zip(sealed.packings, sealed.format.cuts)):
        planes = sealed.planes(side)
        if upto[side] > n:
            done = sealed.rows(side)
            index = torch.tensor([*range(done, n), *after[: upto[side] - n]]) - base
            more = sealed.format.seal(side, tail[side][:, index])
            planes = [torch.cat((p[:, : sealed.counts[side]], new), 1) for p, new in zip(planes, more)]
        sides.append(packing.side(planes, upto[side], cut.rows))
    return PackedBlocks((sides[0], sides[1]), tail, base)


def seal_alike(layers: Sequence[LayerKV], saliency: LayerSaliency | None = None) -> int | None:
    """Seal what committed rows fill, as `LayerKV.seal` of each layer does, where all have sealed blocks already,
    equally many, that native kernels read. Returns bytes moved; None: it is not so, and nothing was done."""
    tails = [
        (layer.blocks, layer.slabs[0].buffer.planes, layer.slabs[0].base)
        for layer in layers
        if layer.blocks is not None and len(layer.slabs) == 1
    ]
    if len(tails) < len(layers) or not alike([sealed for sealed, _, _ in tails]):
        return None
    n = layers[0].n
    return None if any(layer.n != n for layer in layers) else seal_full(tails, n, saliency=saliency)


def alike(layers: Sequence[LayerBlocks]) -> bool:
    """True if all have sealed blocks, equally many, that native kernels read, of whatever format each is fitted to."""
    return all(each.active and each.packings is not None and each.counts == layers[0].counts for each in layers)


def sides_struct(sealed: LayerBlocks) -> SidesStruct:
    """Returns the blocks that are sealed now, as native steps take them."""
    assert sealed.packings is not None
    keys, values = (
        packing.side(sealed.planes(side), sealed.rows(side), cut.rows).struct
        for side, (packing, cut) in enumerate(zip(sealed.packings, sealed.format.cuts))
    )
    return SidesStruct(keys=keys, values=values)
