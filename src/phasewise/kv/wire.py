"""In what form rows travel: what a store method may offer beside the form in which rows are kept.

`KV.dump` goes in, plain data and tensors come out, and the other way round. A lossy wire changes rows once and at one
moment, when their prompt is complete: `settled` gives an engine that goes on by itself the very numbers that would have
arrived elsewhere, so that where a request runs, what is lost on the way and what is computed again change no token.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from phasewise.kv.format import RowFormat

Dump = list[dict[str, Any]]  # KV.dump
DIGEST = 16  # bytes


class Misfit(Exception):
    """Raised where what arrived cannot be used; the message says why."""


@dataclass(frozen=True, slots=True)
class RowsOrigin:
    """The origin of rows: `rows` of them were computed in `seconds` (0 = not known), and `may_stop` says whether the
    receiver could compute a suffix of them again."""

    may_stop: bool = False
    rows: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Encoded:
    """The form in which rows are sent: plain data and tensors. `lossy`: some rows are not what they were; `rows`: only
    so many are there, from the first on (None = all)."""

    content: Any
    lossy: bool = False
    rows: int | None = None


class Wire(Protocol):
    """One per engine: it may remember what it has measured."""

    form: str  # names everything that shapes what arrives; both sides must have the same
    fixed: bool  # every move is made alike; else what arrives depends on the link, and nothing is settled

    def encode(self, dumped: Dump, origin: RowsOrigin) -> Encoded:
        """The rows of `dumped`, ready to be sent."""
        ...

    def decode(self, content: Any) -> Dump:
        """Returns what `encode` was given, as far as it was sent. Raises Misfit for anything damaged."""
        ...

    def settled(self, dumped: Dump) -> Dump:
        """Returns the rows as they would arrive if they were sent."""
        ...

    def delivered(self, n_bytes: int, seconds: float) -> None:
        """Told of every message that arrived: how long the link took for it."""
        ...


class Numbers:
    """A wire over rows that are kept in a form of their own, row by row: they leave as numbers, and are put into that
    form again where they arrive, or stay."""

    def __init__(self, wire: Wire, format: RowFormat, dtype: torch.dtype) -> None:
        self._wire, self._format, self._dtype = wire, format, dtype
        self.form, self.fixed = f"{wire.form}, kept by {type(format).__name__}", wire.fixed

    def encode(self, dumped: Dump, origin: RowsOrigin) -> Encoded:
        return self._wire.encode(self._opened(dumped), origin)

    def decode(self, content: Any) -> Dump:
        return self._kept(self._wire.decode(content))

    def settled(self, dumped: Dump) -> Dump:
        return self._kept(self._wire.settled(self._opened(dumped)))

    def delivered(self, n_bytes: int, seconds: float) -> None:
        self._wire.delivered(n_bytes, seconds)

    def _opened(self, dumped: Dump) -> Dump:
        planes = [piece["planes"] and [*self._format.decode(piece["planes"], self._dtype)] for piece in dumped]
        return [{**piece, "planes": each} for piece, each in zip(dumped, planes)]

    def _kept(self, dumped: Dump) -> Dump:
        planes = [piece["planes"] and [*self._format.encode(*piece["planes"])] for piece in dumped]
        return [{**piece, "planes": each} for piece, each in zip(dumped, planes)]


def sealed(body: bytes, about: str) -> Tensor:
    """Bytes with a checksum of them and of what is known `about` them, as a uint8 tensor that a link can carry."""
    return torch.frombuffer(bytearray(_digest(body, about) + body), dtype=torch.uint8)


def opened(message: Tensor, about: str) -> bytes:
    """The bytes of `sealed`. Raises Misfit if they, or what is known about them, are not what they were."""
    if not isinstance(message, Tensor) or message.dtype != torch.uint8 or message.dim() != 1:
        raise Misfit(f"{about}: bytes are wanted")
    data = message.cpu().numpy().tobytes()
    if data[:DIGEST] != _digest(data[DIGEST:], about):
        raise Misfit(f"{about}: the checksum of {len(data)} bytes is wrong")
    return data[DIGEST:]


def _digest(body: bytes, about: str) -> bytes:
    return hashlib.blake2b(body, digest_size=DIGEST, key=hashlib.sha256(about.encode()).digest()).digest()


def bits_of(tensors: Iterable[Tensor]) -> bytes:
    """The numbers of tensors, one after the other, bit for bit."""
    return b"".join(t.contiguous().flatten().cpu().view(torch.uint8).numpy().tobytes() for t in tensors)


def from_bits(data: bytes, shapes: Sequence[Sequence[int]], dtype: torch.dtype) -> list[Tensor]:
    """Tensors of these shapes from `bits_of`. Raises ValueError if the bytes are not as many as they take."""
    sizes = [torch.Size(shape).numel() for shape in shapes]
    if len(data) != sum(sizes) * dtype.itemsize:
        raise ValueError(f"{len(data)} bytes are not {sum(sizes)} numbers of {dtype}")
    if not data:
        return [torch.empty(shape, dtype=dtype) for shape in shapes]
    pieces = torch.split(torch.frombuffer(bytearray(data), dtype=dtype), sizes)
    return [piece.view(list(shape)) for piece, shape in zip(pieces, shapes)]
