"""Numbers of few bits in bytes, and groups of numbers as few evenly spaced levels.

The first of several levels lies in the lowest bits of the first byte, and nothing is padded but the last byte: `n`
levels take `ceil(n * bits / 8)` bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST = torch.finfo(torch.float16).max


def packed(n: int, bits: int) -> int:
    """Bytes that `n` levels take."""
    return -(-n * bits // 8)


def pack(levels: Tensor, bits: int) -> Tensor:
    """Levels uint8 [..., n], each below 2 ** bits, -> bytes uint8 [..., packed(n, bits)]."""
    n = levels.shape[-1]
    if bits == 8:
        return levels.clone()
    if 8 % bits == 0:
        each = 8 // bits
        rows = by(_padded(levels, -n % each), each)
        made = rows[..., 0].clone(memory_format=torch.contiguous_format)
        for i in range(1, each):  # far quicker than shifting by a tensor
            made |= rows[..., i] << i * bits
        return made
    words = by(_padded(levels, -n % 8), 8).long()  # of 8 levels, which fill `bits` bytes
    word = (words << _shifts(8, bits, words)).sum(-1, keepdim=True)
    spread: Tensor = (word >> _shifts(bits, 8, word)) & 255
    return spread.flatten(-2)[..., : packed(n, bits)].to(torch.uint8)


def unpack(data: Tensor, n: int, bits: int) -> Tensor:
    """The inverse of `pack`."""
    mask = (1 << bits) - 1
    if bits == 8:
        return data[..., :n]
    if 8 % bits == 0:
        several: Tensor = (data[..., None] >> _shifts(8 // bits, bits, data)) & mask
        return several.flatten(-2)[..., :n]
    spread = by(_padded(data, -data.shape[-1] % bits), bits).long()
    word = (spread << _shifts(bits, 8, spread)).sum(-1, keepdim=True)
    levels: Tensor = (word >> _shifts(8, bits, word)) & mask
    return levels.flatten(-2)[..., :n].to(torch.uint8)


def by(x: Tensor, each: int) -> Tensor:
    """[..., n] -> [..., n / each, each]."""
    return x.reshape(*x.shape[:-1], x.shape[-1] // each, each)


def _padded(x: Tensor, more: int) -> Tensor:
    return torch.nn.functional.pad(x, (0, more)) if more else x


def _shifts(count: int, by: int, like: Tensor) -> Tensor:
    return torch.arange(0, count * by, by, dtype=like.dtype, device=like.device)


def quantise(groups: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Groups [..., g] -> levels uint8 [..., g], and of each group the step and the lowest level, float16 [...].

    The levels are the nearest of 2 ** bits between a group's smallest and its largest number. Step and lowest level are
    rounded before levels are chosen, so a number that lies between them is off by half a step and what that rounding
    moved the ends.
    """
    x = groups.float()
    low = x.amin(-1).clamp(-LARGEST, LARGEST).to(torch.float16)
    step = ((x.amax(-1) - low.to(x.dtype)) / ((1 << bits) - 1)).clamp(0, LARGEST).to(torch.float16)
    wide = step.to(x.dtype)[..., None]
    levels = ((x - low.to(x.dtype)[..., None]) / wide.where(wide > 0, 1)).round_().clamp_(0, (1 << bits) - 1)
    return levels.to(torch.uint8), step, low


def dequantise(levels: Tensor, step: Tensor, low: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers that `quantise` stands for, of `dtype`; worked out in float32 at least."""
    wide = torch.promote_types(dtype, torch.float32)
    return (levels.to(wide) * step.to(wide)[..., None] + low.to(wide)[..., None]).to(dtype)
