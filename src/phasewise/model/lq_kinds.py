"""Matrices in blocks of few bits, chosen by their squared error: the configurations that LQ-LoRA's allocation has.

Each is a kind that the native kernels multiply as it lies (`ops/native/levels.py`). Of every group of inputs several
scales are tried, between one that reaches the group's extremes and one that cuts them off, and the best is kept.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from phasewise.gguf.blocks import TYPES
from phasewise.ops.native.levels import KINDS

Bytes = NDArray[np.uint8]
EXPANDED = {each.name: each.expand for each in TYPES.values()}
# from few bits to many: 4.13, 4.25, 4.38, 4.5, 4.75, 5.5, 6 and 8.5 with their scales
MENU = ("INT4_128", "INT4_64", "INT4_64_ZEROS", "IQ4_NL", "INT4_32_ZEROS", "Q5_0", "Q5_1", "Q8_0")
TRIED = (1.04, 0.97, 0.9, 0.83)  # of the scale that reaches the extremes
MINIMA = ("Q5_1",)  # whose groups have a smallest number, in float16 behind the scale
TABLE = torch.tensor([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=torch.float32)
LARGEST = 61_440.0  # a scale, in float16
OUTPUTS = 256  # that are rounded at a time


def bits_of(kind: str) -> float:
    """Bits of a weight, its share of the scales among them."""
    return KINDS[kind].size * 8 / KINDS[kind].inputs


def fitting(inputs: int) -> tuple[str, ...]:
    """The kinds whose blocks divide so many inputs."""
    return tuple(kind for kind in MENU if inputs % KINDS[kind].inputs == 0)


class Coded(NamedTuple):
    """A matrix in blocks of a kind, uint8 [out, bytes of a row], and what they stand for, float32 [out, in]."""

    kind: str
    raw: Tensor
    values: Tensor


def encode(weight: Tensor, kind: str) -> Coded:
    """A finite matrix float32 [out, in], whose inputs are whole blocks, in a kind of `MENU`."""
    outputs, inputs = weight.shape
    of = KINDS[kind]
    raw = np.empty((outputs, inputs // of.inputs * of.size), np.uint8)
    for start in range(0, outputs, OUTPUTS):
        some = weight[start : start + OUTPUTS].float().reshape(-1, of.inputs)
        raw[start : start + OUTPUTS] = _blocks(some, kind).reshape(-1, raw.shape[1])
    return Coded(kind, torch.from_numpy(raw), decode(raw, kind))


def decode(raw: Bytes, kind: str) -> Tensor:
    """Blocks uint8 [out, bytes of a row] -> the matrix float32 [out, in]."""
    blocks = raw.reshape(-1, KINDS[kind].size)
    if kind in EXPANDED:
        values = EXPANDED[kind](blocks)
    else:
        values = _from_table(blocks) if kind == "IQ4_NL" else _int4(blocks, kind.endswith("_ZEROS"))
    return torch.from_numpy(values.astype(np.float32, copy=False)).reshape(len(raw), -1)


def finite(raw: Bytes, kind: str) -> bool:
    """True if all blocks stand for finite numbers."""
    blocks = raw.reshape(-1, KINDS[kind].size)
    ends = np.ascontiguousarray(blocks[:, : 4 if kind in MINIMA else 2]).view(np.float16)
    return bool(np.isfinite(ends).all())


def _int4(blocks: Bytes, zeros: bool) -> NDArray[np.float32]:
    d = np.ascontiguousarray(blocks[:, :2]).view(np.float16).astype(np.float32)
    middle = blocks[:, 2:3].astype(np.float32) if zeros else np.float32(8)
    bytes_ = blocks[:, 3 if zeros else 2 :]
    levels = np.stack((bytes_ & 15, bytes_ >> 4), -1).reshape(len(blocks), -1)
    return d * (levels.astype(np.float32) - middle)


def _from_table(blocks: Bytes) -> NDArray[np.float32]:
    d = np.ascontiguousarray(blocks[:, :2]).view(np.float16).astype(np.float32)
    levels = np.concatenate((blocks[:, 2:] & 15, blocks[:, 2:] >> 4), 1)
    values: NDArray[np.float32] = d * TABLE.numpy()[levels]
    return values


# ---- levels
class _Levels(NamedTuple):
    """Of groups [n, g]: levels float32 [n, g], scales float32 [n], zeros or minima float32 [n] where there are some."""

    levels: Tensor
    scale: Tensor
    other: Tensor | None
    values: Tensor


def _level_bits(kind: str) -> int:
    return 8 if kind == "Q8_0" else 5 if kind.startswith("Q5") else 4


def _half(scale: Tensor) -> Tensor:
    return scale.clamp(-LARGEST, LARGEST).half().float()


def _safe(scale: Tensor) -> Tensor:
    return scale.where(scale != 0, torch.ones(()))[:, None]


def _middle(x: Tensor, share: float, bits: int) -> _Levels:
    """Levels around 0, of which there is one more below."""
    most = (1 << bits) - 1
    scale = _half(x.abs().amax(1) * (2 * share / most))
    levels = (x / _safe(scale) + (1 << (bits - 1))).round_().clamp_(0, most)
    return _Levels(levels, scale, None, (levels - (1 << (bits - 1))) * scale[:, None])


def _zeros(x: Tensor, share: float, bits: int) -> _Levels:
    """Levels around one of the group's own that stands for 0."""
    most = (1 << bits) - 1
    low, high = x.amin(1).clamp_max(0) * share, x.amax(1).clamp_min(0) * share
    scale = _half((high - low) / most)
    zero = (-low / _safe(scale)[:, 0]).round_().clamp_(0, most)
    levels = (x / _safe(scale) + zero[:, None]).round_().clamp_(0, most)
    return _Levels(levels, scale, zero, (levels - zero[:, None]) * scale[:, None])


def _minima(x: Tensor, share: float, bits: int) -> _Levels:
    """Levels from a smallest number on."""
    most = (1 << bits) - 1
    low, high = x.amin(1), x.amax(1)
    scale = _half((high - low) * share / most)
    lowest = _half((high + low) / 2 - scale * most / 2)
    levels = ((x - lowest[:, None]) / _safe(scale)).round_().clamp_(0, most)
    return _Levels(levels, scale, lowest, levels * scale[:, None] + lowest[:, None])


def _table(x: Tensor, share: float) -> _Levels:
    """Numbers of a table, closer together around 0; the largest number of a group takes the table's largest."""
    peak = x.gather(1, x.abs().argmax(1, keepdim=True))[:, 0]
    scale = _half(peak * (share / float(TABLE[0])))
    levels = torch.bucketize((x / _safe(scale)).contiguous(), (TABLE[1:] + TABLE[:-1]) / 2)
    return _Levels(levels.float(), scale, None, TABLE[levels] * scale[:, None])


def _tried(x: Tensor, kind: str, share: float) -> _Levels:
    if kind == "IQ4_NL":
        return _table(x, share)
    how = _zeros if kind.endswith("_ZEROS") else _minima if kind in MINIMA else _middle
    return how(x, share, _level_bits(kind))


def _best(x: Tensor, kind: str) -> _Levels:
    """Group by group, the levels with the smallest squared error."""
    best = _tried(x, kind, TRIED[0])
    error = (x - best.values).square().sum(1)
    for share in TRIED[1:]:
        found = _tried(x, kind, share)
        own = (x - found.values).square().sum(1)
        better = own < error
        error = torch.where(better, own, error)
        wide = better[:, None]
        other = None if best.other is None or found.other is None else torch.where(better, found.other, best.other)
        best = _Levels(torch.where(wide, found.levels, best.levels), torch.where(better, found.scale, best.scale),
                       other, torch.where(wide, found.values, best.values))  # fmt: skip
    return best


def _blocks(groups: Tensor, kind: str) -> Bytes:
    """Groups float32 [n, inputs of a block] -> blocks uint8 [n, size]."""
    found = _best(groups, kind)
    levels = found.levels.to(torch.uint8).numpy()
    parts = [found.scale.half()[:, None].numpy().view(np.uint8)]
    if kind in MINIMA:
        assert found.other is not None
        parts.append(found.other.half()[:, None].numpy().view(np.uint8))
    elif found.other is not None:
        parts.append(found.other.to(torch.uint8)[:, None].numpy())
    if kind == "Q8_0":
        return np.concatenate([*parts, levels ^ 128], 1)
    if kind.startswith("INT4"):
        return np.concatenate([*parts, levels[:, ::2] | levels[:, 1::2] << 4], 1)
    if kind.startswith("Q5"):
        parts.append(np.packbits(levels >> 4, axis=1, bitorder="little"))
    low = levels & 15
    return np.concatenate([*parts, low[:, :16] | low[:, 16:] << 4], 1)
