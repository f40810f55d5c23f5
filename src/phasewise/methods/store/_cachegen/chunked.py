"""A wire that cuts a request's rows into chunks and codes each by itself, at a level of its own.

A chunk holds the rows of all layers: scales, then symbols at about their entropy, under a checksum that also covers
what is known about them. Chunks at level 0, and those with a number that is not finite, hold the rows bit for bit.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from phasewise.kv.format import KVShape
from phasewise.kv.wire import Dump, Encoded, Misfit, RowsOrigin, bits_of, from_bits, opened, sealed
from phasewise.methods.store._cachegen import entropy
from phasewise.methods.store._cachegen.pacing import LinkPacer
from phasewise.methods.store._cachegen.rounding import LEVELS, Rounded, compress, expand, forms
from phasewise.methods.store._cachegen.tables import SymbolTables


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """How rows are cut and coded: `level` None = chosen per chunk, so that a move takes at most `deadline` seconds."""

    level: int | None
    chunk: int  # rows
    group: int  # rows; see rounding.py
    deadline: float


@dataclass(frozen=True, slots=True)
class ChunkRows:
    """A chunk's rows of one slab: keys and values [h, r, D] of a layer."""

    layer: int
    planes: Sequence[Tensor]


class Chunked:
    """See `Wire`. `bandwidth`: bytes a second of the link if it is known, else it is measured. `tables`: those by
    which symbols are coded; None: every chunk brings its own."""

    def __init__(
        self, cut: ChunkPlan, shapes: Sequence[KVShape], bandwidth: float | None = None,
        tables: SymbolTables | None = None,
    ) -> None:  # fmt: skip
        self.cut, self.shapes, self.tables = cut, list(shapes), tables
        self.fixed = cut.level is not None
        self.form = f"chunked 1: {cut}"
        self.pace = LinkPacer([shapes[0].dtype.itemsize, *map(self._most, range(1, len(LEVELS) + 1))], bandwidth)

    def _most(self, level: int) -> float:
        """Bytes a number can take at a level, without scales."""
        steps = [n for layer in range(len(self.shapes)) for n in self._steps(level, layer)]
        return sum(math.log2(2 * n + 1) for n in steps) / len(steps) / 8

    def _steps(self, level: int, layer: int) -> tuple[int, int]:
        return LEVELS[level - 1].steps(layer, len(self.shapes))

    # ---- the wire
    def encode(self, dumped: Dump, origin: RowsOrigin) -> Encoded:
        chunks = [list(self._blocks(dumped, at)) for at in range(self._count(map(_shape, dumped)))]
        plan = self._plan(chunks, origin)
        levels = [level for level in plan if level is not None]
        rows = len(levels) * self.cut.chunk if len(levels) < len(plan) else None
        pieces = [
            {"heads": piece["heads"], "positions": piece["positions"], "last": bool(piece.get("last")),
             "shape": _cut(_shape(piece), rows)}
            for piece in dumped
        ]  # fmt: skip
        known, messages = _known(pieces), []
        for at, blocks in enumerate(chunks[: len(levels)]):
            body, levels[at] = self.encode_rows(blocks, levels[at])
            messages.append(sealed(body, f"chunk {at} at level {levels[at]} of {known}"))
            self.pace.encoded(levels[at], _numbers(blocks), len(body))
        return Encoded({"levels": levels, "pieces": pieces, "chunks": messages}, lossy=any(levels), rows=rows)

    def decode(self, content: Any) -> Dump:
        try:
            return self._dump(content["pieces"], content["levels"], content["chunks"])
        except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
            raise Misfit(f"the chunks cannot be read: {type(error).__name__}: {error}") from error

    def settled(self, dumped: Dump) -> Dump:
        assert self.cut.level is not None
        for at in range(self._count(map(_shape, dumped))):
            blocks = list(self._blocks(dumped, at))
            for forms_, plane in zip(self._rounded(blocks, self.cut.level) or (), _planes(blocks)):
                plane.copy_(_tall(expand(forms_, self.cut.group), plane))
        return dumped

    def delivered(self, n_bytes: int, seconds: float) -> None:
        self.pace.delivered(n_bytes, seconds)

    # ---- all chunks
    def _plan(self, chunks: Sequence[Sequence[ChunkRows]], origin: RowsOrigin) -> list[int | None]:
        if self.cut.level is not None:
            return [self.cut.level] * len(chunks)
        self.pace.computed(origin.rows, origin.seconds)
        rows = [max(block.planes[0].shape[1] for block in blocks) for blocks in chunks]
        return self.pace.plan(rows, [_numbers(blocks) for blocks in chunks], self.cut.deadline, origin.may_stop)

    def _count(self, shapes: Iterator[list[int] | None]) -> int:
        return -(-max((shape[1] for shape in shapes if shape), default=0) // self.cut.chunk)

    def _blocks(self, dumped: Dump, at: int) -> Iterator[ChunkRows]:
        """Views of the rows of chunk `at`, slab by slab."""
        layer, rows = 0, slice(at * self.cut.chunk, (at + 1) * self.cut.chunk)
        for piece in dumped:
            planes = [plane[:, rows] for plane in piece["planes"]]
            if planes and planes[0].shape[1]:
                yield ChunkRows(layer, planes)
            layer += bool(piece.get("last"))

    def _dump(self, pieces: Sequence[dict[str, Any]], levels: Sequence[int], messages: Sequence[Tensor]) -> Dump:
        count, known = self._count(piece["shape"] for piece in pieces), _known(pieces)
        if not len(levels) == len(messages) == count:
            raise Misfit(f"{len(messages)} chunks instead of {count}")
        bodies = [opened(m, f"chunk {at} at level {levels[at]} of {known}") for at, m in enumerate(messages)]
        dumped = list(self._empty(pieces))
        for at, body in enumerate(bodies):
            blocks = list(self._blocks(dumped, at))
            for plane, numbers in zip(_planes(blocks), self.decode_rows(body, levels[at], blocks)):
                plane.copy_(numbers)
        return dumped

    def _empty(self, pieces: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """Room for the rows of these pieces."""
        layer = 0
        for piece in pieces:
            shape, wanted = self.shapes[layer], piece["shape"]
            if wanted and (wanted[0] > shape.heads or wanted[2] != shape.dim):
                raise Misfit(f"rows {wanted} do not fit {shape}")
            planes = [torch.empty(wanted, dtype=shape.dtype, device=shape.device) for _ in range(2)] if wanted else []
            yield {"heads": piece["heads"], "positions": piece["positions"], "planes": planes, "last": piece["last"]}
            layer += piece["last"]

    # ---- one chunk
    def _rounded(self, blocks: Sequence[ChunkRows], level: int) -> list[list[Rounded]] | None:
        """The rounded forms of every plane; None if there is a number that is not finite."""
        found = []
        for block in blocks:
            for plane, steps in zip(block.planes, self._steps(level, block.layer)):
                found.append(compress(_flat(plane), steps, self.cut.group))
                if not all(bool(form.scales.isfinite().all()) for form in found[-1]):
                    return None
        return found

    def encode_rows(self, blocks: Sequence[ChunkRows], level: int) -> tuple[bytes, int]:
        """The bytes of a chunk, and the level they are at: rows that cannot be rounded go as they are."""
        rounded = self._rounded(blocks, level) if level else None
        if rounded is None:
            return bits_of(_planes(blocks)), 0
        every = [form for plane in rounded for form in plane]
        streams = [(form.symbols.T.contiguous().cpu().numpy(), 2 * form.steps + 1) for form in every]
        scales = bits_of(form.scales for form in every)
        if self.tables is not None:
            return scales + self.tables.encode(level, [symbols for symbols, _ in streams]), level
        return scales + entropy.encode(streams), level

    def decode_rows(self, body: bytes, level: int, blocks: Sequence[ChunkRows]) -> list[Tensor]:
        """The numbers of every plane, [h, r, D]."""
        planes, group = list(_planes(blocks)), self.cut.group
        if not level:
            return from_bits(body, [plane.shape for plane in planes], planes[0].dtype)
        steps = [n for block in blocks for n in self._steps(level, block.layer)]
        sizes = [(plane.shape[0] * plane.shape[2], rows, n)
                 for plane, most in zip(planes, steps) for rows, n in forms(plane.shape[1], most, group)]  # fmt: skip
        split = sum(rows for _, rows, _ in sizes) * torch.bfloat16.itemsize
        scales = from_bits(body[:split], [(rows,) for _, rows, _ in sizes], torch.bfloat16)
        streams = self._streams(body[split:], level, sizes)
        every = [Rounded(s, torch.from_numpy(x).T, n) for s, x, (_, _, n) in zip(scales, streams, sizes)]
        each = len(every) // len(planes)
        return [_tall(expand(every[i * each : (i + 1) * each], group), plane) for i, plane in enumerate(planes)]

    def _streams(self, coded: bytes, level: int, sizes: Sequence[tuple[int, int, int]]) -> Sequence[entropy.Symbols]:
        """The symbols that were entropy-coded, a stream for each of `sizes`: (width, rows, largest symbol)."""
        if self.tables is not None:
            return self.tables.decode(level, coded, [(width, rows) for width, rows, _ in sizes])
        return entropy.decode(coded, [(width, rows, 2 * n + 1) for width, rows, n in sizes])


def _shape(piece: dict[str, Any]) -> list[int] | None:
    """[h, n, D]; None for a layer that was freed."""
    return list(piece["planes"][0].shape) if piece["planes"] else None


def _cut(shape: list[int] | None, rows: int | None) -> list[int] | None:
    return shape if shape is None or rows is None else [shape[0], min(shape[1], rows), shape[2]]


def _known(pieces: Sequence[dict[str, Any]]) -> str:
    """All that a checksum covers besides a chunk's bytes: a hash of the pieces, indices included."""
    plain = [[piece["shape"], piece["last"]] for piece in pieces]
    tensors = [piece[key] for piece in pieces for key in ("heads", "positions") if piece[key] is not None]
    return hashlib.blake2b(json.dumps(plain).encode() + bits_of(tensors), digest_size=16).hexdigest()


def _planes(blocks: Sequence[ChunkRows]) -> Iterator[Tensor]:
    return (plane for block in blocks for plane in block.planes)


def _numbers(blocks: Sequence[ChunkRows]) -> int:
    return sum(plane.numel() for plane in _planes(blocks))


def _flat(plane: Tensor) -> Tensor:
    """[h, r, D] -> float32 [r, h * D]."""
    return plane.float().permute(1, 0, 2).flatten(1)


def _tall(rows: Tensor, plane: Tensor) -> Tensor:
    """[r, h * D] -> [h, r, D], shaped as `plane`."""
    return rows.view(plane.shape[1], plane.shape[0], -1).permute(1, 0, 2)
