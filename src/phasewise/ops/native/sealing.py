"""Rows that become packed blocks, of many layers in one native call. Its plain twin: ops/packing.py."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from phasewise.ops.native import library


class Sealing(NamedTuple):
    """Of one layer's keys or values: rows bfloat16 [H, slots, D], the first of them slot `base`, and the planes they go
    to, [H, B, ...] as in Side, from block `start` on, of `each` slots."""

    rows: Tensor
    levels: Tensor
    step: Tensor
    low: Tensor
    start: int
    each: int
    base: int = 0


def fits(rows: Tensor) -> bool:
    """Whether the kernel seals these."""
    return rows.dtype == torch.bfloat16 and rows.stride()[1:] == (rows.shape[2], 1) and library() is not None


class Seals:
    """Many layers' blocks of one shape, all of whose rows fit (`fits`), as the kernel takes them."""

    __slots__ = ("_like", "_words")

    def __init__(self, blocks: Sequence[Sealing], by_channel: bool, bits: int, group: int) -> None:
        self._words = words = array("q")
        for rows, levels, step, low, start, each, base in blocks:
            words.extend((rows.data_ptr() - base * rows.stride(1) * rows.itemsize, rows.stride(0)))
            words.extend(x.data_ptr() + start * x.stride(1) * x.itemsize for x in (levels, step, low))
            words.extend((levels.stride(0), step.stride(0), 0, each, bits, group, *(0,) * 15))
        self._like = len(blocks), blocks[0].rows.shape[0], blocks[0].rows.shape[2], by_channel

    def __call__(self, slots: int, first: int = 0, block: int = 0) -> None:
        """Fill planes with so many slots from slot `first` on, which fill whole blocks, bit for bit as torch does; from
        block `block` behind the start on."""
        kernels = library()
        assert kernels is not None
        where, threads = self._words.buffer_info()[0], torch.get_num_threads()
        call = array("q", (where, *self._like, threads, slots, first, block))
        kernels.seal(call.buffer_info()[0])
