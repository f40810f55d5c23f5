"""Small symbols to bytes and back, at about their entropy: a range coder with a distribution per channel, sent along.

A histogram is sent as the nearest half powers of two, which costs a few hundredths of a bit per symbol and makes short
tables; where channels have few symbols, neighbours share one. All arithmetic on the way to the coder's probabilities is
on integers, so the two sides agree wherever they run. The coder is the library `constriction`.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Symbols = npt.NDArray[np.uint8]
HEAD = struct.Struct("<II")  # bytes of the deflated tables, and of the range coder's words
TOP = 64  # codes of counts
FREQUENCIES = np.array([math.isqrt(1 << (code + 16)) - 256 for code in range(TOP)], dtype=np.float32)
"""What a code stands for: counts near 2 ** (code / 2) - 1, in units of 1 / 256."""


def library() -> Any:
    """The module `constriction`. Raises ModuleNotFoundError if it is not installed, which is for those who code with it
    to say before they begin."""
    import constriction

    return constriction


def encode(streams: Sequence[tuple[Symbols, int]]) -> bytes:
    """Each stream is (symbols uint8 [C, T], alphabet); symbols lie below the alphabet."""
    coder = library().stream
    encoder, tables = coder.queue.RangeEncoder(), []
    for symbols, alphabet in streams:
        if not symbols.size:
            continue
        counts = histogram(symbols, alphabet)
        share = sharing(counts)
        codes = codes_of(_merged(counts, share))  # [C / share, A]
        tables.append(struct.pack("<I", share) + codes.tobytes())
        for values, row in zip(symbols.reshape(len(codes), -1), FREQUENCIES[codes]):
            encoder.encode(values.astype(np.int32), coder.model.Categorical(row, perfect=False))
    deflated = zlib.compress(b"".join(tables), 9)
    words: bytes = encoder.get_compressed().astype("<u4").tobytes()
    return HEAD.pack(len(deflated), len(words)) + deflated + words


def decode(data: bytes, shapes: Sequence[tuple[int, int, int]]) -> list[Symbols]:
    """The streams of `encode`, given their (C, T, alphabet). Raises ValueError for bytes that cannot be theirs.

    Damage that still looks like a message is not noticed: whoever keeps or carries bytes adds a checksum.
    """
    coder = library().stream
    if len(data) < HEAD.size or len(data) != HEAD.size + sum(HEAD.unpack_from(data)):
        raise ValueError(f"{len(data)} bytes are not the length of the message")
    split = HEAD.size + HEAD.unpack_from(data)[0]
    try:
        tables = zlib.decompress(data[HEAD.size : split])
        decoder = coder.queue.RangeDecoder(np.frombuffer(data[split:], dtype="<u4").astype(np.uint32))
        streams, at = [], 0
        for channels, length, alphabet in shapes:
            if not channels * length:
                streams.append(np.empty((channels, length), np.uint8))
                continue
            (share,) = struct.unpack_from("<I", tables, at)
            size = channels // share * alphabet
            codes = np.frombuffer(tables, np.uint8, size, at + 4).reshape(-1, alphabet)
            at += 4 + size
            models = (coder.model.Categorical(row, perfect=False) for row in FREQUENCIES[codes])
            values = [decoder.decode(model, length * share) for model in models]
            streams.append(np.stack(values).astype(np.uint8).reshape(channels, length))
    except (AssertionError, ArithmeticError, IndexError, struct.error, zlib.error) as error:
        raise ValueError(f"the message cannot be read: {error}") from error
    if at != len(tables):
        raise ValueError(f"{len(tables) - at} bytes of tables are left over")
    return streams


def histogram(symbols: Symbols, alphabet: int) -> npt.NDArray[np.int64]:
    """[C, T] -> how often each channel has each symbol, [C, A]."""
    channels = len(symbols)
    rows = symbols + np.arange(channels, dtype=np.int64)[:, None] * alphabet
    return np.bincount(rows.ravel(), minlength=channels * alphabet).reshape(channels, alphabet)


def codes_of(counts: npt.NDArray[np.int64]) -> Symbols:
    """The half power of two next to each count plus one."""
    codes: Symbols = np.rint(2 * np.log2(1 + counts)).astype(np.uint8)
    return codes


def entropy(counts: npt.NDArray[np.int64]) -> float:
    """Bits of all symbols counted, each at the entropy of its row."""
    seen = counts[counts > 0]
    totals = counts.sum(-1)
    totals = totals[totals > 0]
    return float((totals * np.log2(totals)).sum() - (seen * np.log2(seen)).sum())


def sharing(counts: npt.NDArray[np.int64]) -> int:
    """How many neighbouring channels had best share a table: fewest bits for symbols and tables together."""
    channels = len(counts)
    bits = {}
    for share in (n for n in range(1, channels + 1) if channels % n == 0):
        merged = _merged(counts, share)
        bits[share] = entropy(merged) + entropy(np.bincount(codes_of(merged).ravel(), minlength=TOP)[None])
    return min(bits, key=lambda share: bits[share])


def _merged(counts: npt.NDArray[np.int64], share: int) -> npt.NDArray[np.int64]:
    merged: npt.NDArray[np.int64] = counts.reshape(len(counts) // share, share, -1).sum(1)
    return merged
