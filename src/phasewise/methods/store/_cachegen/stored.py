"""CacheGen's form of prefix blocks that are kept on disk: at one level, or at all of them for a reader to choose."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from phasewise.kv.format import KVShape, RowFormat
from phasewise.kv.tiers.codec import BlockLayout, BlockPacer, BlockPlanes, OnlyVersion
from phasewise.kv.wire import Misfit
from phasewise.methods.store._cachegen.chunked import Chunked, ChunkRows
from phasewise.methods.store._cachegen.pacing import LoadPacer, VersionSpeeds


class StoredBlocks:
    """A `BlockCodec`. Each version of a block is a byte that says its level, and what `Chunked` makes of its rows. A
    block with a number that is not finite has its rows bit for bit in every version."""

    lossy = True

    def __init__(
        self, chunked: Chunked, levels: Sequence[int], shapes: Sequence[KVShape], format: RowFormat,
        layout: BlockLayout,
    ) -> None:  # fmt: skip
        """`levels` of the versions, the best first; `format`: in which rows are kept."""
        self._chunked, self._levels, self._shapes = chunked, list(levels), list(shapes)
        self._format, self._layout = format, layout
        tables = "" if chunked.tables is None else chunked.tables.form
        self.form = f"{chunked.form}, levels {self._levels}, kept by {type(format).__name__}, tables {tables}"
        self._speeds = VersionSpeeds(chunked.pace.known)

    def encode(self, planes: BlockPlanes) -> Sequence[bytes]:
        blocks = [
            ChunkRows(at, self._format.decode(each, shape.dtype))
            for at, (each, shape) in enumerate(zip(planes, self._shapes))
        ]
        made = (self._chunked.encode_rows(blocks, level) for level in self._levels)
        return [bytes([level]) + body for body, level in made]

    def decode(self, version: int, body: bytearray) -> BlockPlanes:
        if version >= len(self._levels) or not body or body[0] not in (0, self._levels[version]):
            raise Misfit("it was written at another level")
        blocks = [
            ChunkRows(at, [torch.empty((shape.heads, self._layout.rows, shape.dim), dtype=shape.dtype)] * 2)
            for at, shape in enumerate(self._shapes)
        ]
        try:
            found = self._chunked.decode_rows(bytes(body[1:]), body[0], blocks)
        except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
            raise Misfit(f"it cannot be read: {type(error).__name__}: {error}") from error
        pairs = zip(found[::2], found[1::2], self._shapes)
        return [list(self._format.encode(k.to(shape.dtype), v.to(shape.dtype))) for k, v, shape in pairs]

    def pacer(self) -> BlockPacer:
        if len(self._levels) == 1:
            return OnlyVersion()
        return LoadPacer(self._speeds, self._chunked.cut.deadline)
