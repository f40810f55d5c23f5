"""The rows of one layer that a step can read. They are decoded no earlier and no further than asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from phasewise.kv.format import RowFormat

if TYPE_CHECKING:
    from phasewise.kv.beside import Beside
    from phasewise.kv.blocks import PackedBlocks
    from phasewise.kv.shared_rows import SharedRows


@dataclass(slots=True)
class KVPart:
    """Rows of some KV heads: `planes` [h, N, ...] as the format keeps them; `k`, `v` and `take` as the model made them.

    The last `fresh` of the N rows are this step's, and `ids` their rows in the span (None = 0, 1, 2, ...). `heads`
    None = all KV heads. `derived` is shared by the parts of a layer and emptied whenever committed rows move or go;
    `slab` tells the parts apart until then.
    """

    planes: Sequence[Tensor]
    format: RowFormat
    dtype: torch.dtype
    n: int  # committed rows
    fresh: int
    ids: Tensor | None
    heads: Tensor | None
    committed: Tensor | None  # positions [1 | h, n]; None = 0 .. n-1
    pending: Sequence[int]
    slab: int
    derived: Beside
    bytes: int | None = None  # of all rows, where some are sealed; they are opened here
    packed: PackedBlocks | None = (
        None  # where kernels find them packed; they are opened when `planes` are first looked at
    )
    shared: SharedRows | None = None  # the first rows, held by reference: joined when `planes` are first looked at
    own: Sequence[Tensor] = ()  # then the planes of the rows behind these
    _whole: tuple[Tensor, Tensor] | None = field(default=None, init=False)

    @property
    def size(self) -> tuple[int, int]:
        """(KV heads, rows)."""
        return self._there[0].shape[0], self.n + self.fresh

    @property
    def _there(self) -> Sequence[Tensor]:
        """Planes of some of its rows that need not be opened or joined first."""
        if self.packed is not None:
            return self.packed.tail
        return self.planes if self.shared is None else self.own

    @property
    def k(self) -> Tensor:
        """[h, N, D]; rows are decoded when first asked for."""
        return self._decoded()[0]

    @property
    def v(self) -> Tensor:
        """[h, N, D]."""
        return self._decoded()[1]

    def _decoded(self) -> tuple[Tensor, Tensor]:
        if self._whole is None:
            self._whole = self.format.decode(self.planes, self.dtype)
        return self._whole

    def take(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [h, S, D] of the slots `index` [h, S]; no other row is read or decoded."""
        heads = torch.arange(index.shape[0], device=index.device)[:, None]
        return self.format.decode([plane[heads, index] for plane in self.planes], self.dtype)

    def between(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Keys and values [h, stop - start, D] of consecutive slots; no other row is read or decoded."""
        planes, before = self.planes, 0
        if self.shared is not None and start >= self.shared.n:
            planes, before = self.own, self.shared.n
        return self.format.decode([plane[:, start - before : stop - before] for plane in planes], self.dtype)

    def keys(self, start: int, stop: int) -> Tensor:
        """The keys of `between`."""
        return self.between(start, stop)[0]

    @property
    def plain(self) -> bool:
        """Positions are simply 0 .. n-1 for the committed rows."""
        return self.committed is None

    @property
    def positions(self) -> Tensor:
        """True positions, int64 [1 | h, N]."""
        device = self._there[0].device
        old = torch.arange(self.n, device=device)[None] if self.committed is None else self.committed
        if not self.fresh:
            return old
        new = torch.tensor(list(self.pending), device=device)[None].expand(old.shape[0], -1)
        return torch.cat((old, new), 1)
