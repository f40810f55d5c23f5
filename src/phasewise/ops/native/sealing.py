"""Rows that become packed blocks, of many layers in one native call. Its plain twin: ops/packing.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from phasewise.ops.native import library
from phasewise.ops.native.abi import SealCallStruct, SealedStruct, SealStruct, Structures


class Sealing(NamedTuple):
    """One layer's keys or values that are quantised: rows bfloat16 [H, slots, D], the first of them slot `base`, and
    the planes they go to, [H, B, ...] as in Side, from block `start` on, of `each` slots."""

    rows: Tensor
    levels: Tensor
    step: Tensor
    low: Tensor
    start: int
    each: int
    base: int = 0


def fits(rows: Tensor) -> bool:
    """True if the kernel quantises these."""
    return rows.dtype == torch.bfloat16 and rows.stride()[1:] == (rows.shape[2], 1) and library() is not None


class Seals:
    """Many layers' blocks of one shape, all of whose rows fit (`fits`), as the kernel takes them."""

    __slots__ = ("_call", "_seals")

    def __init__(self, blocks: Sequence[Sealing], by_channel: bool, bits: int, group: int) -> None:
        self._seals = Structures(SealStruct, [_seal(block, bits, group) for block in blocks])
        heads, _, dim = blocks[0].rows.shape
        self._call = SealCallStruct(seals=self._seals, count=len(blocks), heads=heads, dim=dim, by_channel=by_channel)

    def __call__(self, slots: int, first: int = 0, block: int = 0) -> None:
        """Fill planes with so many slots from slot `first` on, which fill whole blocks, bit for bit as torch does; from
        block `block` behind the start on."""
        kernels, call = library(), self._call
        assert kernels is not None
        call.threads, call.slots, call.rows, call.blocks = torch.get_num_threads(), slots, first, block
        kernels.seal(call.address)


def _seal(block: Sealing, bits: int, group: int) -> SealStruct:
    rows, levels, step, low, start, each, base = block
    first, *to = (
        x.data_ptr() + at * x.stride(1) * x.itemsize
        for x, at in ((rows, -base), (levels, start), (step, start), (low, start))
    )
    sealed = SealedStruct(
        levels=to[0], step=to[1], low=to[2], levels_head=levels.stride(0), ends_head=step.stride(0), rows=each,
        bits=bits, group=group,
    )  # fmt: skip
    return SealStruct(rows=first, row_head=rows.stride(0), to=sealed)
