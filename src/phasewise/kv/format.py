"""The forms in which keys and values are kept: row by row (`RowFormat`), and blocks of finished rows (`BlockFormat`).

The KV of a layer (`LayerKV`, kv/layer_kv.py) is a tail of rows in a row format, and in front of that, if its format is
a block format as well, quantised blocks (`LayerBlocks`, kv/blocks.py).

Formats are pure functions of tensors and know nothing of requests, bytes or steps. A *plane* is one of the tensors that
a format keeps: int8 levels or float16 scales, say.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from phasewise.ops.native.spans import SecondClass, Side, opens

Kind = tuple[tuple[int, ...], torch.dtype]  # shape and dtype of a plane
KEYS, VALUES = SIDES = (0, 1)


@dataclass(frozen=True, slots=True)
class KVShape:
    """The keys and values that one layer caches for one token: `heads` of `dim` numbers each."""

    heads: int
    dim: int
    dtype: torch.dtype
    device: str = "cpu"


# ---- rows
class RowFormat(ABC):
    """The form in which rows are kept. A row's form depends on that row alone (DESIGN law 4)."""

    exactness: str  # true | quantised | predicted | sparse

    # planes are keys int8 [H, N, D], their scales bfloat16 [H, N], then values and theirs, each row rounded to the
    # nearest level of its largest magnitude / 127: native kernels read and write these
    scaled: bool = False

    @abstractmethod
    def planes(self, shape: KVShape) -> list[Kind]:
        """Per plane: the trailing shape of one (head, row) entry, and its dtype."""

    @abstractmethod
    def encode(self, k: Tensor, v: Tensor) -> Sequence[Tensor]:
        """[H, R, D] keys and values -> planes [H, R, ...]."""

    @abstractmethod
    def decode(self, planes: Sequence[Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Planes [H, N, ...] -> keys and values [H, N, D] of `dtype`."""


class Raw(RowFormat):
    """Rows kept as the model made them."""

    exactness = "true"

    def planes(self, shape: KVShape) -> list[Kind]:
        return [((shape.dim,), shape.dtype)] * 2

    def encode(self, k: Tensor, v: Tensor) -> Sequence[Tensor]:
        return k, v

    def decode(self, planes: Sequence[Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return planes[0], planes[1]


def kinds_bytes(kinds: Sequence[Kind]) -> int:
    """Bytes of one entry of all these planes."""
    total = 0
    for tail, dtype in kinds:
        n = 1
        for size in tail:
            n *= size
        total += n * dtype.itemsize
    return total


def entry_bytes(format: RowFormat, shape: KVShape) -> int:
    """Bytes of one row of one head."""
    return kinds_bytes(format.planes(shape))


# ---- blocks
@dataclass(frozen=True, slots=True)
class BlockCut:
    """Blocks of `rows` rows; the newest `tail` rows are never sealed, and neither is what does not fill a block."""

    rows: int
    tail: int = 0

    def blocks(self, n: int) -> int:
        """Returns the number of blocks that are sealed when `n` rows are there."""
        return max(0, n - self.tail) // self.rows

    def sealed(self, n: int) -> int:
        """Rows in them."""
        return self.blocks(n) * self.rows

    def last(self, blocks: int) -> int:
        """The most rows that may be there with no more than so many blocks."""
        return (blocks + 1) * self.rows + self.tail - 1


class BlockFormat(ABC):
    """A row format that also quantises finished blocks of rows, whose numbers share parameters.

    Blocks are sealed for each KV head by itself, and depend on their rows alone. If `by_saliency`, all heads of a layer
    are sealed together (`kinds` is asked for one head of all their numbers), and a block depends on two more things:
    how much its rows matter, which the evict method that comes with the store says (`verbs/evict.py: saliency`), and
    planes that are settled once, by the rows of the complete prompt. The saliency of a block's rows is known when the
    last of them is committed, so a step brings no rows on both sides of a boundary.
    """

    cuts: tuple[BlockCut, BlockCut]  # of keys and of values
    by_saliency: ClassVar[bool] = False
    by_prompt: ClassVar[bool] = False  # a layer's format is fitted to each prompt (`fit`), which takes `by_saliency`

    def packings(self, dim: int) -> tuple[Packing | Classes, Packing | Classes] | None:
        """Returns the layout of the planes of a block of keys and of values, of heads of `dim` numbers, if native
        kernels know it: they read blocks as they are, and nothing is rounded to the rows' dtype. None: blocks are
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
        """Planes [h, blocks, ...] and, behind them, the settled ones -> rows [h, blocks * rows, D] of the shape's
        dtype."""

    # ---- by saliency
    def fit(self, saliency: Tensor) -> int:
        """What `fitted` takes, above 0: by the saliency of a complete prompt's rows, of those in blocks if any are."""
        raise NotImplementedError("blocks of this format are alike for all prompts")

    def fitted(self, fit: int) -> BlockFormat:
        """The format of a layer's blocks from then on, for that request. They take no more bytes than this one's."""
        raise NotImplementedError("blocks of this format are alike for all prompts")

    def settled(self, side: int, shape: KVShape) -> list[Kind]:
        """Per plane: the shape and dtype of what is settled; nothing unless `by_saliency`."""
        return []

    def settle(self, side: int, x: Tensor) -> Sequence[Tensor]:
        """Rows of a prompt [h, n, D] -> planes [1, ...]."""
        raise NotImplementedError("nothing is settled where saliency does not matter")

    def seal_ranked(self, side: int, x: Tensor, saliency: Tensor, settled: Sequence[Tensor]) -> Sequence[Tensor]:
        """In place of `seal`: rows [h, blocks * rows, D], their saliency [blocks * rows] and the settled planes
        [1, 1, ...] -> planes [1, blocks, ...]. A block's planes may hold rows of others that are sealed with it. Or
        all of them of several layers, [L, h, ...], [L, ...] and [L, 1, ...] -> [L, blocks, ...]."""
        raise NotImplementedError("saliency does not matter to these blocks")


def block_format(format: RowFormat | BlockFormat) -> BlockFormat | None:
    """The format, if it quantises finished blocks."""
    return format if isinstance(format, BlockFormat) else None


def form_of(format: BlockFormat, shape: KVShape) -> KVShape:
    """Returns the shape that blocks are made for: that of each head of a layer, or one head that has the numbers of
    all."""
    return replace(shape, heads=1, dim=shape.heads * shape.dim) if format.by_saliency else shape


def block_bytes(format: BlockFormat, shape: KVShape, side: int) -> int:
    """Bytes of one block of one head."""
    return kinds_bytes(format.kinds(side, shape))


def settled_bytes(format: BlockFormat, shape: KVShape, side: int) -> int:
    """Bytes of what is settled of one head."""
    return kinds_bytes(format.settled(side, shape))


def booked(format: RowFormat | BlockFormat, shape: KVShape, rows: int) -> int:
    """Bytes of a layer that are set aside for the blocks of so many rows."""
    blocks = block_format(format)
    if blocks is None:
        return 0
    shape = form_of(blocks, shape)
    each = (blocks.cuts[side].blocks(rows) * block_bytes(blocks, shape, side) for side in SIDES)
    return (sum(each) + sum(settled_bytes(blocks, shape, side) for side in SIDES)) * shape.heads


# ---- blocks that native kernels read
@dataclass(frozen=True, slots=True)
class Packing:
    """Planes that kernels read. Those of a side are step and low, float16 [h, blocks, lines, groups], and levels uint8
    [h, blocks, lines, bytes] as `ops/packing.py` makes them: of keys a line is what a block has of one channel, of
    values what it has of one row. Before these may lie what is added to them: the thin matrices of a product of this
    `rank`, float16 [h, blocks, rows, rank] and [h, blocks, D, rank], and numbers `apart` of each line, float16 [h,
    blocks, lines, apart], with their places int16."""

    bits: int
    group: int
    rank: int = 0
    apart: int = 0

    def side(self, planes: Sequence[Tensor], slots: int, rows: int) -> Side:
        """Returns the first `slots` rows as kernels read them."""
        *more, step, low, levels = planes
        thin, apart = more[:2] if self.rank else (), more[-2:] if self.apart else ()
        return Side(levels, step, low, slots, rows, self.bits, self.group, thin, apart)

    def fits(self, rows: int, dim: int) -> bool:
        """True if kernels read blocks of so many rows, of heads of so many numbers."""
        return opens(self.bits, self.group, rows, dim, self.rank, self.apart)


@dataclass(frozen=True, slots=True)
class Classes:
    """The same of a side whose rows are of two classes, of so many `bits` [upper, lower] a number, all heads together:
    the planes [1, blocks, ...] are bits that say which rows are of the upper one, and of either class step and low,
    float16 for each row, and levels; what is settled are the scales of channels. `by_channel`, steps and lowest numbers
    are instead those of each channel of a block's rows of the class, and nothing is settled."""

    bits: tuple[int, int]
    by_channel: bool = False

    def side(self, planes: Sequence[Tensor], slots: int, rows: int) -> Side:
        upper, step, low, levels, rest_step, rest_low, rest_levels, *scale = planes
        rest = SecondClass(upper, scale[0] if scale else None, rest_levels, rest_step, rest_low, self.bits[1])
        return Side(levels, step, low, slots, rows, self.bits[0], 8 * levels.shape[-1] // self.bits[0], rest=rest)

    def fits(self, rows: int, dim: int) -> bool:
        return all(bits in (2, 4, 8) for bits in self.bits) and opens(2, 32, 8, dim)


def packings(format: BlockFormat, shape: KVShape) -> tuple[Packing | Classes, Packing | Classes] | None:
    """Returns the layout of the planes of keys and values; None if native kernels do not read them."""
    found = format.packings(shape.dim)
    if found is None or shape.dtype != torch.bfloat16 or shape.device != "cpu":
        return None
    (keys, values), rows = found, format.cuts[0].rows
    return found if keys.fits(rows, shape.dim) and values.fits(8, shape.dim) else None
