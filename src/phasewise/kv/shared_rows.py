"""The first rows of a request where the prefix tree keeps them: held by reference, read there and never written.

The tree's ledger entry is the only one for these rows, however many requests hold them. A request holds the nodes, so
they stay until the last holder has left, and then as long as the prefix cache has room. So what a batch shares is
stored once (arXiv 2402.05099).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from phasewise.ops.native.abi import PlanesStruct
from phasewise.ops.native.spans import BLOCK


class SharedRows:
    """The first `n` rows of one layer in `blocks`, planes [H, rows, ...] each; a block has a multiple of BLOCK rows."""

    __slots__ = ("_structs", "blocks", "n")

    def __init__(self, blocks: Sequence[Sequence[Tensor]]) -> None:
        self.blocks = blocks
        self.n = sum(planes[0].shape[1] for planes in blocks)
        self._structs: list[PlanesStruct] = []

    def joined(self, own: Sequence[Tensor]) -> list[Tensor]:
        """Copies of the planes with those of the rows behind them, `own` [H, r, ...]: [H, n + r, ...]."""
        return [torch.cat(pieces, 1) for pieces in zip(*self.blocks, own)]

    @property
    def structs(self) -> Sequence[PlanesStruct]:
        """The addresses of every BLOCK rows, as native kernels take them; of rows as the model made them, or int8 with
        scales (`RowFormat.scaled`)."""
        if not self._structs:
            self._structs = [lying(planes, at) for planes in self.blocks for at in range(0, planes[0].shape[1], BLOCK)]
        return self._structs


def lying(planes: Sequence[Tensor], at: int) -> PlanesStruct:
    """Returns the addresses of planes [H, rows, ...] from row `at` on."""
    addresses = [plane.data_ptr() + at * plane.stride(1) * plane.itemsize for plane in planes]
    found = PlanesStruct(head=planes[0].stride(0))
    if len(planes) == 2:
        found.k, found.v = addresses
    else:
        found.k, found.k_scale, found.v, found.v_scale = addresses
        found.scale_head = planes[1].stride(0)
    return found
