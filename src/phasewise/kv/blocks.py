"""Finished blocks of rows, packed under parameters that they share, in front of a tail of rows as the model made them.

A row of a prompt reads all rows as they were made. Any later row reads as sealed what is sealed when just the rows that
it sees have been there before it: so the form in which it reads depends on how many these are and on nothing else, and
chunks, drafts, replays, prefix hits and hand-offs give the same numbers. Blocks are sealed when a prompt is complete,
and then one by one as they fill; keys and values have cuts of their own.

Left out: eviction from sealed blocks, and heads or layers that keep different rows. Prefix blocks hold
rows as they were made, and so does a prompt that leaves for another engine until it has arrived there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from phasewise.kv.buffer import Buffer, Kind, KVShape, Ledger, Raw, entry_bytes
from phasewise.kv.packed import packings

if TYPE_CHECKING:
    from phasewise.verbs.store import Codec

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


class Blocks(Protocol):
    """What a codec with `cuts` says besides (see verbs/store.py). Everything is per KV head, and pure."""

    @property
    def cuts(self) -> tuple[BlockCut, BlockCut]: ...

    def kinds(self, side: int, shape: KVShape) -> list[Kind]:
        """Per plane: the shape and dtype of what is kept for one (head, block)."""
        ...

    def seal(self, side: int, x: Tensor) -> Sequence[Tensor]:
        """Rows [h, blocks * rows, D] -> planes [h, blocks, ...]. A block's planes depend on that block alone."""
        ...

    def open(self, side: int, planes: Sequence[Tensor], shape: KVShape) -> Tensor:
        """Planes [h, blocks, ...] -> rows [h, blocks * rows, D] of the shape's dtype."""
        ...


def sealing(codec: Codec) -> Blocks | None:
    """The codec, if it seals finished blocks."""
    return codec if hasattr(codec, "cuts") else None  # type: ignore[return-value]


class _Side:
    """The planes of a side's blocks, for a `Buffer` whose rows are blocks."""

    exactness = "quantised"

    def __init__(self, codec: Blocks, side: int) -> None:
        self.codec, self.side = codec, side

    def planes(self, shape: KVShape) -> list[Kind]:
        return self.codec.kinds(self.side, shape)

    def encode(self, k: Tensor, v: Tensor) -> Sequence[Tensor]:
        raise NotImplementedError("blocks are sealed, not encoded row by row")

    def decode(self, planes: Sequence[Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        raise NotImplementedError("blocks are opened, not decoded row by row")


def block_bytes(codec: Blocks, shape: KVShape, side: int) -> int:
    """Of one block of one head."""
    return entry_bytes(_Side(codec, side), shape)


def booked(codec: Codec, shape: KVShape, rows: int) -> int:
    """Bytes of a layer that are set aside for the blocks of so many rows."""
    blocks = sealing(codec)
    if blocks is None:
        return 0
    return sum(blocks.cuts[side].blocks(rows) * block_bytes(blocks, shape, side) for side in SIDES) * shape.heads


class Sealed:
    """The sealed blocks of one layer, [keys, values]: `counts` of them in `buffers`, which are taken ahead, when room
    for rows is made. `active` once the prompt is complete. Forks share the buffers until either side makes room."""

    __slots__ = ("active", "buffers", "codec", "counts", "ledger", "packings", "raw", "shape")

    def __init__(self, codec: Blocks, shape: KVShape, ledger: Ledger, rows: int) -> None:
        self.codec, self.shape, self.ledger = codec, shape, ledger
        self.raw, self.packings = Raw(), packings(codec, shape)
        self.active, self.counts = False, [0, 0]
        self.buffers = [self._buffer(side, codec.cuts[side].blocks(rows)) for side in SIDES]

    @classmethod
    def of(cls, codec: Codec, shape: KVShape, ledger: Ledger, rows: int) -> Sealed | None:
        """With room for the blocks of so many rows; None for a codec that seals nothing."""
        blocks = sealing(codec)
        return None if blocks is None else cls(blocks, shape, ledger, rows)

    def _buffer(self, side: int, blocks: int) -> Buffer:
        return Buffer(_Side(self.codec, side), self.shape, self.shape.heads, blocks, self.ledger)

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
    def bytes(self) -> int:
        return sum(buffer.bytes for buffer in self.buffers)

    def live_bytes(self, n: int) -> int:
        """Of all `n` rows, sealed or not."""
        return sum(self._bytes(side, self.rows(side), n) for side in SIDES)

    def read_bytes(self, upto: Sequence[int], n: int) -> int:
        """What reading `n` rows costs with the first `upto` [keys, values] of them sealed."""
        return sum(self._bytes(side, upto[side], n) for side in SIDES)

    def _bytes(self, side: int, sealed: int, n: int) -> int:
        blocks = sealed // self.codec.cuts[side].rows * block_bytes(self.codec, self.shape, side)
        return self.shape.heads * (blocks + (n - sealed) * self.shape.dim * self.shape.dtype.itemsize)

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
            total += blocks * self.shape.heads * block_bytes(self.codec, self.shape, side)
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
    def take(self, planes: Sequence[Tensor], base: int, n: int) -> int:
        """Seal what `n` rows fill; `planes` hold those from row `base` on as they were made. Returns bytes written."""
        self.active, moved = True, 0
        for side, cut in enumerate(self.codec.cuts):
            start, stop = self.counts[side], cut.blocks(n)
            if start == stop:
                continue
            buffer = self.buffers[side]
            assert buffer.refs == 1 and stop <= buffer.cap, "room is made before a step"
            rows = planes[side][:, start * cut.rows - base : stop * cut.rows - base]
            for plane, new in zip(buffer.planes, self.codec.seal(side, rows)):
                plane[:, start:stop] = new
                moved += new.nbytes
            self.counts[side] = stop
        return moved

    # ---- reading
    def opened(self, planes: Sequence[Tensor], base: int, n: int) -> list[Tensor]:
        """Keys and values [h, n, D]: blocks opened, and behind them the rows of `planes`, which begin with `base`."""
        found = []
        for side, (plane, buffer) in enumerate(zip(planes, self.buffers)):
            sealed = self.rows(side)
            if not sealed:
                found.append(plane[:, : n - base])
                continue
            whole = plane.new_empty((plane.shape[0], n, plane.shape[2]))
            packed = [p[:, : self.counts[side]] for p in buffer.planes]
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
        return {"counts": list(self.counts), "planes": kept}

    def load(self, counts: Sequence[int], planes: Sequence[Sequence[Tensor]]) -> int:
        """Fill an empty one, which then is active. Returns bytes copied."""
        self.counts, self.active = list(counts), True
        return sum(self._copy(self.buffers[side], planes[side], counts[side]) for side in SIDES)

    def fork(self) -> Sealed:
        twin = object.__new__(Sealed)
        twin.codec, twin.shape, twin.ledger, twin.raw = self.codec, self.shape, self.ledger, self.raw
        twin.active, twin.counts, twin.packings = self.active, list(self.counts), self.packings
        twin.buffers = [buffer.share() for buffer in self.buffers]
        return twin

    def close(self) -> None:
        for buffer in self.buffers:
            buffer.drop()
        self.buffers = []
