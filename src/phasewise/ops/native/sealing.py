"""Rows that become packed blocks, of many layers in one native call. Its plain twin: ops/packing.py."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from phasewise.ops.native import library


class Sealing(NamedTuple):
    """Of one layer's keys or values: `rows` bfloat16 [H, slots, D], which fill whole blocks of `each` slots, and the
    planes they go to, [H, B, ...] as in Side, from block `start` on."""

    rows: Tensor
    levels: Tensor
    step: Tensor
    low: Tensor
    start: int
    each: int


def fits(rows: Tensor) -> bool:
    """Whether the kernel seals these."""
    return rows.dtype == torch.bfloat16 and rows.stride()[1:] == (rows.shape[2], 1) and library() is not None


def seal(blocks: Sequence[Sealing], by_channel: bool, bits: int, group: int) -> None:
    """Fill the planes, bit for bit as torch does. All of one shape; every one's rows must fit (`fits`)."""
    kernels, words = library(), array("q")
    assert kernels is not None
    heads, slots, dim = blocks[0].rows.shape
    for rows, levels, step, low, start, each in blocks:
        words.extend((rows.data_ptr(), rows.stride(0)))
        words.extend(x.data_ptr() + start * x.stride(1) * x.itemsize for x in (levels, step, low))
        words.extend((levels.stride(0), step.stride(0), slots, each, bits, group, *(0,) * 9))
    call = array("q", (words.buffer_info()[0], len(blocks), heads, dim, by_channel, torch.get_num_threads()))
    kernels.seal(call.buffer_info()[0])
