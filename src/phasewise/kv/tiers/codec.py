"""The form in which a prefix block is written: its planes bit for bit, or what a store method makes of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from phasewise.kv.format import Kind, KVShape, RowFormat
from phasewise.kv.wire import Misfit, bits_of

BlockPlanes = list[list[Tensor]]  # [layer][plane] of [H, rows, ...]


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """The layout of a block's planes: layer by layer, the shape and dtype of each plane, all of `rows` rows."""

    rows: int
    kinds: tuple[tuple[Kind, ...], ...]

    @classmethod
    def of(cls, shapes: Sequence[KVShape], format: RowFormat, rows: int) -> BlockLayout:
        """That of blocks of so many rows, kept in a row format by layers of these shapes."""
        kinds = (tuple(((shape.heads, rows, *tail), dtype) for tail, dtype in format.planes(shape)) for shape in shapes)
        return cls(rows, tuple(kinds))

    @property
    def bytes(self) -> int:
        """Bytes of one block as it is."""
        return sum(math.prod(shape) * dtype.itemsize for layer in self.kinds for shape, dtype in layer)

    def planes(self, body: bytearray | memoryview) -> BlockPlanes:
        """Views of the planes whose bits one buffer holds. Raises Misfit unless it has just as many bytes."""
        if len(body) != self.bytes:
            raise Misfit(f"{len(body)} bytes are not the {self.bytes} of a block")
        found, at = BlockPlanes(), 0
        for layer in self.kinds:
            found.append([])
            for shape, dtype in layer:
                count = math.prod(shape)
                found[-1].append(torch.frombuffer(body, dtype=dtype, count=count, offset=at).view(shape))
                at += count * dtype.itemsize
        return found


class BlockPacer(Protocol):
    """Chooses the version of each block while one chain of blocks is loaded."""

    def choose(self, sizes: Sequence[int], left: int) -> int | None:
        """The version of the next block to read, of those that take so many bytes each; `left` blocks are still to
        come, this one included. None: they had better be computed."""
        ...

    def took(self, n_bytes: int, reading: float, decoding: float) -> None:
        """A block has been read in so many seconds, and checked and decoded in so many more."""
        ...


class BlockCodec(Protocol):
    """What a block is written as: one version, or several of which a reader takes one. Used by threads of the tiers
    at any time, so it keeps nothing from call to call that is not safe to share."""

    form: str  # names all that shapes what is written; blocks of another form are never read
    lossy: bool  # what comes back may differ from what was given

    def encode(self, planes: BlockPlanes) -> Sequence[bytes]:
        """Every version of a block, the best first."""
        ...

    def decode(self, version: int, body: bytearray) -> BlockPlanes:
        """The planes of a version. Raises Misfit for bytes that cannot be its own."""
        ...

    def pacer(self) -> BlockPacer:
        """A pacer for one chain of blocks."""
        ...


class OnlyVersion:
    """The pacer of blocks that have one version."""

    def choose(self, sizes: Sequence[int], left: int) -> int | None:
        return 0

    def took(self, n_bytes: int, reading: float, decoding: float) -> None:
        pass


class RawBlocks:
    """Blocks bit for bit: the planes of all layers, one after another."""

    form, lossy = "bits", False

    def __init__(self, layout: BlockLayout) -> None:
        self._layout = layout

    def encode(self, planes: BlockPlanes) -> Sequence[bytes]:
        return [bits_of(plane for layer in planes for plane in layer)]

    def decode(self, version: int, body: bytearray) -> BlockPlanes:
        return self._layout.planes(body)

    def pacer(self) -> BlockPacer:
        return OnlyVersion()
