"""Finished blocks of rows, packed under parameters that they share, in front of a tail of rows as the model made them.

A row of a prompt reads all rows as they were made. Any later row reads as sealed what is sealed when just the rows that
it sees have been there before it: so the form in which it reads depends on how many these are and on nothing else, and
chunks, drafts, replays, prefix hits and hand-offs give the same numbers. Blocks are sealed when a prompt is complete,
and then one by one as they fill; keys and values have cuts of their own.

Where blocks hang on how much their rows matter as well (`Marked`), no step has rows on both sides of a border.

Left out: eviction from sealed blocks, and heads or layers that keep different rows. Prefix blocks hold
rows as they were made, and so does a prompt that leaves for another engine until it has arrived there.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from phasewise.kv.buffer import Buffer, Codec, Kind, KVShape, Ledger, Raw, entry_bytes
from phasewise.kv.packed import Classes, Packing, packings

KEYS, VALUES = SIDES = (0, 1)
SLACK = 32  # rows of the tail's buffer beyond the longest tail, at least: it is moved once in so many rows


@dataclass(frozen=True, slots=True)
class BlockCut:
    """Blocks of `rows` rows; the newest `tail` rows are never sealed, and neither is what does not fill a block."""

    rows: int
    tail: int = 0

    def blocks(self, n: int) -> int:
        """How many are sealed when `n` rows are there."""
        return max(0, n - self.tail) // self.rows

    def sealed(self, n: int) -> int:
        """Rows in them."""
        return self.blocks(n) * self.rows

    def last(self, blocks: int) -> int:
        """The most rows that may be there with no more than so many blocks."""
        return (blocks + 1) * self.rows + self.tail - 1


class BlockCodec(ABC):
    """A codec that also packs finished blocks of rows together. Everything is per KV head, and pure."""

    cuts: tuple[BlockCut, BlockCut]  # of keys and of values

    def packings(self, dim: int) -> tuple[Packing | Classes, Packing | Classes] | None:
        """How the planes of a block of keys and of values lie, of heads of `dim` numbers, where native kernels know
        that (kv/packed.py): they read blocks as they are, and nothing is rounded to the rows' dtype. None: blocks are
        opened first."""
        return None

    @abstractmethod
    def kinds(self, side: int, shape: KVShape) -> list[Kind]:
        """Per plane: the shape and dtype of what is kept for one (head, block)."""

    @abstractmethod
    def seal(self, side: int, x: Tensor) -> Sequence[Tensor]:
        """Rows [h, blocks * rows, D] -> planes [h, blocks, ...]. A block's planes depend on that block alone."""

    @abstractmethod
    def open(self, side: int, planes: Sequence[Tensor], shape: KVShape) -> Tensor:
        """Planes [h, blocks, ...] -> rows [h, blocks * rows, D] of the shape's dtype."""


def sealing(codec: Codec) -> BlockCodec | None:
    """The codec, if it seals finished blocks."""
    return codec if isinstance(codec, BlockCodec) else None


Marks = Callable[[int, int], Tensor]
"""(start, stop) -> how much the rows start .. stop - 1 of a layer matter, [stop - start]."""


class Marked(BlockCodec):
    """A codec whose blocks hang on more than their rows: on marks, which the evict method that comes with the store
    gives these (`verbs/evict.py: saliency`), and on planes that are settled once, by the rows of the complete prompt.

    All heads of a layer are packed together: `kinds` is asked for one head of all their numbers. A block's marks are
    known when its last row is committed, so a step brings no rows on both sides of a border.
    """

    @abstractmethod
    def settled(self, side: int, shape: KVShape) -> list[Kind]:
        """Per plane: the shape and dtype of what is settled."""

    @abstractmethod
    def settle(self, side: int, x: Tensor) -> Sequence[Tensor]:
        """Rows of a prompt [h, n, D] -> planes [1, ...]."""

    @abstractmethod
    def classed(self, side: int, x: Tensor, marks: Tensor, settled: Sequence[Tensor]) -> Sequence[Tensor]:
        """In place of `seal`: rows [h, blocks * rows, D], their marks [blocks * rows] and the settled planes
        [1, 1, ...] -> planes [1, blocks, ...]. A block's planes may hold rows of others that are sealed with it. Or
        all of them of several layers, [L, h, ...], [L, ...] and [L, 1, ...] -> [L, blocks, ...].

        `open` gets planes of blocks and, behind them, the settled ones.
        """


def marking(codec: Codec | BlockCodec) -> Marked | None:
    """The codec, if its blocks want marks."""
    return codec if isinstance(codec, Marked) else None


def form_of(codec: Codec | BlockCodec, shape: KVShape) -> KVShape:
    """What blocks are made for: each head of a layer, or one that has the numbers of all."""
    return shape if marking(codec) is None else replace(shape, heads=1, dim=shape.heads * shape.dim)


class _Side(Codec):
    """The planes of a side's blocks, for a `Buffer` whose rows are blocks; or its settled ones, for a buffer of one."""

    exactness = "quantised"

    def __init__(self, kinds: Callable[[int, KVShape], list[Kind]], side: int) -> None:
        self.kinds, self.side = kinds, side

    def planes(self, shape: KVShape) -> list[Kind]:
        return self.kinds(self.side, shape)

    def encode(self, k: Tensor, v: Tensor) -> Sequence[Tensor]:
        raise NotImplementedError("blocks are sealed, not encoded row by row")

    def decode(self, planes: Sequence[Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        raise NotImplementedError("blocks are opened, not decoded row by row")


def block_bytes(codec: BlockCodec, shape: KVShape, side: int) -> int:
    """Of one block of one head."""
    return entry_bytes(_Side(codec.kinds, side), shape)


def settled_bytes(codec: BlockCodec, shape: KVShape, side: int) -> int:
    """Of what is settled of one head."""
    marked = marking(codec)
    return 0 if marked is None else entry_bytes(_Side(marked.settled, side), shape)


def booked(codec: Codec, shape: KVShape, rows: int) -> int:
    """Bytes of a layer that are set aside for the blocks of so many rows."""
    blocks = sealing(codec)
    if blocks is None:
        return 0
    shape = form_of(codec, shape)
    each = (blocks.cuts[side].blocks(rows) * block_bytes(blocks, shape, side) for side in SIDES)
    return (sum(each) + sum(settled_bytes(blocks, shape, side) for side in SIDES)) * shape.heads


class Sealed:
    """The sealed blocks of one layer, [keys, values]: `counts` of them in `buffers`, which are taken ahead, when room
    for rows is made, and for codecs with marks what is `settled`. `active` once the prompt is complete. Forks share the
    buffers until either side makes room, and what is settled for good."""

    __slots__ = (
        "active", "buffers", "codec", "counts", "form", "ledger", "marked", "packings", "raw", "settled", "shape",
    )  # fmt: skip

    def __init__(self, codec: BlockCodec, shape: KVShape, ledger: Ledger, rows: int) -> None:
        self.codec, self.shape, self.ledger = codec, shape, ledger
        self.raw, self.form, self.packings = Raw(), form_of(codec, shape), packings(codec, shape)
        self.active, self.counts, self.marked = False, [0, 0], marking(codec)
        self.buffers = [self._buffer(side, codec.cuts[side].blocks(rows)) for side in SIDES]
        self.settled: list[Buffer] = []
        if (marked := self.marked) is not None:
            self.settled = [Buffer(_Side(marked.settled, side), self.form, 1, 1, ledger) for side in SIDES]

    @classmethod
    def of(cls, codec: Codec, shape: KVShape, ledger: Ledger, rows: int) -> Sealed | None:
        """With room for the blocks of so many rows; None for a codec that seals nothing."""
        blocks = sealing(codec)
        return None if blocks is None else cls(blocks, shape, ledger, rows)

    def _buffer(self, side: int, blocks: int) -> Buffer:
        return Buffer(_Side(self.codec.kinds, side), self.form, self.form.heads, blocks, self.ledger)

    # ---- sizes
    def rows(self, side: int) -> int:
        """Rows in sealed blocks."""
        return self.counts[side] * self.codec.cuts[side].rows

    @property
    def first(self) -> int:
        """The first row that is needed as it was made."""
        return min(map(self.rows, SIDES))

    @property
    def longest(self) -> int:
        """The longest tail there may be between two steps."""
        return max(cut.last(0) for cut in self.codec.cuts)

    @property
    def held(self) -> list[Buffer]:
        """All of them."""
        return [*self.buffers, *self.settled]

    @property
    def bytes(self) -> int:
        return sum(buffer.bytes for buffer in self.held)

    def live_bytes(self, n: int) -> int:
        """Of all `n` rows, sealed or not."""
        return sum(self._bytes(side, self.rows(side), n, self.active) for side in SIDES)

    def read_bytes(self, upto: Sequence[int], n: int) -> int:
        """What reading `n` rows costs with the first `upto` [keys, values] of them sealed."""
        return sum(self._bytes(side, upto[side], n, upto[side] > 0) for side in SIDES)

    def _bytes(self, side: int, sealed: int, n: int, settled: bool) -> int:
        blocks = sealed // self.codec.cuts[side].rows * block_bytes(self.codec, self.form, side)
        blocks += settled_bytes(self.codec, self.form, side) if settled else 0
        raw = (n - sealed) * self.shape.dim * self.shape.dtype.itemsize
        return self.form.heads * blocks + self.shape.heads * raw

    def spare(self, n: int) -> int:
        """Rows that may come after `n` before more room is needed."""
        if any(buffer.refs > 1 for buffer in self.buffers):
            return 0
        return min(cut.last(buffer.cap) for cut, buffer in zip(self.codec.cuts, self.buffers)) - n

    # ---- room
    def _wanted(self, n: int, roomy: int) -> Iterator[tuple[int, int]]:
        """(side, blocks) of the buffers that do not do for `n` rows; new ones are for `roomy` rows."""
        for side, (cut, buffer) in enumerate(zip(self.codec.cuts, self.buffers)):
            if cut.blocks(n) > buffer.cap or buffer.refs > 1:
                yield side, max(cut.blocks(roomy), buffer.cap)

    def growth(self, n: int, roomy: int) -> int:
        """Bytes that `reserve` would add to the ledger."""
        total = 0
        for side, blocks in self._wanted(n, roomy):
            total += blocks * self.form.heads * block_bytes(self.codec, self.form, side)
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
    def take(self, planes: Sequence[Tensor], base: int, n: int, marks: Marks | None = None) -> int:
        """Seal what `n` rows fill; `planes` hold those from row `base` on as they were made, and the first time these
        are all of the prompt. Returns bytes written."""
        moved = 0 if self.active else self._settle(planes, n)
        self.active = True
        for side, cut in enumerate(self.codec.cuts):
            start, stop = self.counts[side], cut.blocks(n)
            if start == stop:
                continue
            buffer = self.buffers[side]
            assert buffer.refs == 1 and stop <= buffer.cap, "room is made before a step"
            rows = planes[side][:, start * cut.rows - base : stop * cut.rows - base]
            if self.marked is None:
                made = self.codec.seal(side, rows)
            else:
                assert marks is not None, "who seals rows with marks gives them"
                marked = marks(start * cut.rows, stop * cut.rows)
                made = self.marked.classed(side, rows, marked, self.settled[side].planes)
            for plane, new in zip(buffer.planes, made):
                plane[:, start:stop] = new
                moved += new.nbytes
            self.counts[side] = stop
        return moved

    def _settle(self, planes: Sequence[Tensor], n: int) -> int:
        """Forks that share what is settled have the same prompt. Returns bytes written."""
        moved = 0
        for side, buffer in enumerate(self.settled):
            assert self.marked is not None
            for plane, new in zip(buffer.planes, self.marked.settle(side, planes[side][:, :n])):
                plane[:, 0] = new
                moved += new.nbytes
        return moved

    def border(self, n: int) -> int | None:
        """The position of the first row that finds other blocks than one at `n` does, where rows of one step must not;
        None: they may."""
        if self.marked is None:
            return None
        return min(cut.last(cut.blocks(n)) for cut in self.codec.cuts) + 1

    # ---- reading
    def lying(self, side: int) -> list[Tensor]:
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
            packed = [p[:, : self.counts[side]] for p in self.lying(side)]  # of what is settled there is one
            whole[:, :sealed] = self.codec.open(side, packed, self.shape)
            whole[:, sealed:] = plane[:, sealed - base : n - base]
            found.append(whole)
        return found

    def formed(self, side: int, rows: Tensor, upto: int, n: int, after: Sequence[int]) -> Tensor:
        """What `opened` gave, [h, N, D], with the first `upto` rows as if they were sealed: of the `n` committed ones,
        and then of those at the slots `after`."""
        done = self.rows(side)
        if upto <= done:
            return rows
        index = torch.tensor([*range(done, min(n, upto)), *after[: max(0, upto - n)]], device=rows.device)
        whole = rows.clone()
        whole[:, index] = self.codec.open(side, self.codec.seal(side, rows[:, index]), self.shape)
        return whole

    # ---- between steps
    def dump(self) -> dict[str, object]:
        """What `load` takes: plain data and tensors."""
        kept = [[p[:, :count].clone() for p in b.planes] for b, count in zip(self.buffers, self.counts)]
        settled = [[p.clone() for p in buffer.planes] for buffer in self.settled]
        return {"counts": list(self.counts), "planes": kept, "settled": settled}

    def load(
        self, counts: Sequence[int], planes: Sequence[Sequence[Tensor]], settled: Sequence[Sequence[Tensor]]
    ) -> int:
        """Fill an empty one, which then is active. Returns bytes copied."""
        self.counts, self.active = list(counts), True
        moved = sum(self._copy(buffer, planes, 1) for buffer, planes in zip(self.settled, settled))
        return moved + sum(self._copy(self.buffers[side], planes[side], counts[side]) for side in SIDES)

    def fork(self) -> Sealed:
        twin = object.__new__(Sealed)
        twin.codec, twin.shape, twin.ledger, twin.raw = self.codec, self.shape, self.ledger, self.raw
        twin.form, twin.packings, twin.marked = self.form, self.packings, self.marked
        twin.active, twin.counts = self.active, list(self.counts)
        twin.buffers = [buffer.share() for buffer in self.buffers]
        twin.settled = [buffer.share() for buffer in self.settled]
        return twin

    def close(self) -> None:
        for buffer in self.held:
            buffer.drop()
        self.buffers, self.settled = [], []
