"""Block formats: what each type's bytes mean, expanded to float32 whole blocks at a time.

Every block has some values and their scales; `d` and `m` are float16 (value = d * q + m). In the K types 256 values
are a block, and parts of it have whole-number scales of their own, 6 bits each in Q4_K and Q5_K. Figures as published
by the ggml project; tests/gguf hold each against the format's own package.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from phasewise.ops.native.levels import BlockRows

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]


@dataclass(frozen=True)
class BlockType:
    """A type: `values` of a block lie in `size` bytes. `expand`: uint8 [blocks, size] -> float32 [blocks, values]."""

    name: str
    values: int
    size: int
    expand: Callable[[Bytes], Floats]

    def bytes_of(self, shape: Sequence[int]) -> int:
        """The bytes of a tensor of this shape; its last dimension must be whole blocks."""
        return math.prod(shape) // self.values * self.size


class LowRankPair(NamedTuple):
    """Low-rank weights beside a matrix: `up @ down` is added to it. `down` [rank, in], `up` [out, rank]."""

    down: Tensor
    up: Tensor


class BlockMatrix(NamedTuple):
    """A matrix as its file has it: `raw` uint8 [rows, bytes of a row] in blocks of a `kind` (Q4_0 ..), a view of the
    mapped file or made from it row by row.

    `order` int64 [rows]: which of these rows is each row of the matrix; None: as they lie. `done` is told that rows of
    `raw` from one on up to another, that one not among them, need not stay in memory. `columns` int64 [inputs]: which
    input of the matrix is each input of `raw`; None: as they lie. `beside`: what is added to the matrix that the blocks
    stand for; parts of one linear layer may share its `down`. `whole`: a number that they are multiplied with.
    """

    kind: str
    raw: BlockRows
    order: NDArray[np.int64] | None
    done: Callable[[int, int], None]
    columns: NDArray[np.int64] | None = None
    beside: LowRankPair | None = None
    whole: float | None = None


def _half(raw: Bytes) -> Floats:
    """Two bytes per block -> [blocks, 1]."""
    return np.ascontiguousarray(raw).view(np.float16).astype(np.float32)


def _nibbles(raw: Bytes) -> NDArray[np.uint8]:
    """[..., n] -> [..., 2 n]: the low halves of all bytes, then the high ones."""
    return np.concatenate((raw & 15, raw >> 4), axis=-1)


def _fifth(raw: Bytes) -> NDArray[np.uint8]:
    """Four bytes, one bit for each of 32 values -> [blocks, 32], 16 where it is set."""
    return np.unpackbits(raw, axis=-1, bitorder="little") << np.uint8(4)


# ---- plain
def _f32(raw: Bytes) -> Floats:
    return np.ascontiguousarray(raw).view(np.float32)


def _f16(raw: Bytes) -> Floats:
    return np.ascontiguousarray(raw).view(np.float16).astype(np.float32)


def _bf16(raw: Bytes) -> Floats:
    return (np.ascontiguousarray(raw).view(np.uint16).astype(np.uint32) << 16).view(np.float32)


# ---- blocks of 32
def _q4_0(raw: Bytes) -> Floats:
    return _half(raw[:, :2]) * (_nibbles(raw[:, 2:]).astype(np.float32) - 8.0)


def _q4_1(raw: Bytes) -> Floats:
    return _half(raw[:, :2]) * _nibbles(raw[:, 4:]).astype(np.float32) + _half(raw[:, 2:4])


def _q5_0(raw: Bytes) -> Floats:
    return _half(raw[:, :2]) * ((_nibbles(raw[:, 6:]) | _fifth(raw[:, 2:6])).astype(np.float32) - 16.0)


def _q5_1(raw: Bytes) -> Floats:
    return _half(raw[:, :2]) * (_nibbles(raw[:, 8:]) | _fifth(raw[:, 4:8])).astype(np.float32) + _half(raw[:, 2:4])


def _q8_0(raw: Bytes) -> Floats:
    return _half(raw[:, :2]) * raw[:, 2:].view(np.int8).astype(np.float32)


# ---- blocks of 256
def _six_bits(raw: Bytes) -> tuple[Floats, Floats]:
    """Twelve bytes -> eight scales and eight minima, [blocks, 8] each: four of either have their six bits together, the
    other four have four of them in the last bytes, and two on top of the first ones."""
    first, second, rest = raw[:, :4], raw[:, 4:8], raw[:, 8:]
    scales = np.concatenate((first & 63, (rest & 15) | (first >> 6 << 4)), axis=1)
    minima = np.concatenate((second & 63, (rest >> 4) | (second >> 6 << 4)), axis=1)
    return scales.astype(np.float32), minima.astype(np.float32)


def _scaled(raw: Bytes, q: NDArray[np.uint8]) -> Floats:
    """q [blocks, 8, 32] with the scales and minima that Q4_K and Q5_K begin with."""
    scales, minima = _six_bits(raw[:, 4:16])
    d, m = _half(raw[:, :2]) * scales, _half(raw[:, 2:4]) * minima
    return (d[:, :, None] * q.astype(np.float32) - m[:, :, None]).reshape(len(raw), 256)


def _q4_k(raw: Bytes) -> Floats:
    return _scaled(raw, _nibbles(raw[:, 16:].reshape(-1, 4, 32)).reshape(-1, 8, 32))


def _q5_k(raw: Bytes) -> Floats:
    low = _nibbles(raw[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    bits = np.arange(8, dtype=np.uint8)[:, None]  # part j has bit j of each of 32 bytes
    return _scaled(raw, low | (raw[:, None, 16:48] >> bits & np.uint8(1)) << np.uint8(4))


def _q6_k(raw: Bytes) -> Floats:
    """Four bits in two rows of 64 bytes per half, two more in 32 bytes per half, a scale for every 16 values."""
    low = _nibbles(raw[:, :128].reshape(-1, 2, 64)).reshape(-1, 2, 4, 32)
    shifts = np.array([0, 2, 4, 6], dtype=np.uint8)[:, None]
    high = raw[:, 128:192].reshape(-1, 2, 1, 32) >> shifts & 3
    q = (low | high << 4).astype(np.float32).reshape(-1, 16, 16) - 32.0
    scales = _half(raw[:, 208:]) * raw[:, 192:208].view(np.int8).astype(np.float32)
    return (scales[:, :, None] * q).reshape(len(raw), 256)


TYPES: dict[int, BlockType] = {
    0: BlockType("F32", 1, 4, _f32),
    1: BlockType("F16", 1, 2, _f16),
    2: BlockType("Q4_0", 32, 18, _q4_0),
    3: BlockType("Q4_1", 32, 20, _q4_1),
    6: BlockType("Q5_0", 32, 22, _q5_0),
    7: BlockType("Q5_1", 32, 24, _q5_1),
    8: BlockType("Q8_0", 32, 34, _q8_0),
    12: BlockType("Q4_K", 256, 144, _q4_k),
    13: BlockType("Q5_K", 256, 176, _q5_k),
    14: BlockType("Q6_K", 256, 210, _q6_k),
    30: BlockType("BF16", 1, 2, _bf16),
}
