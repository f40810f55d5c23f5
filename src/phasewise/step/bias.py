"""What is added to the scores of the first token, said as data: then nobody has to be asked inside a layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from phasewise.ops.native.stack import StackSpan

if TYPE_CHECKING:
    from phasewise.kv.contiguous import ContiguousView
    from phasewise.step.span import Span


@dataclass(frozen=True, eq=False)
class FirstBias:
    """Rows that see position 0 have `added` float32 [layers, Hq] on its score, after scale and softcap: a factor of
    e^added on its weight, before weights are divided by their sum. Heads that gave the position up, and rows that do
    not see it, are left as they are."""

    added: Tensor

    def natively(self, span: Span, flat: ContiguousView, whole: StackSpan) -> StackSpan:
        """`whole` with this bias on slot 0; or as it is, and then the method is asked in each layer: where an evict
        method acts (one whose `sight` differs by head, too), or heads or layers keep unequally many rows."""
        if span.phase.watches(span) or flat.unequal is not None:
            return whole
        if flat.gaps and (flat.cuts is not None or not flat.n):
            return whole
        table = flat.biases.get(self)
        if table is None:
            table = flat.biases[self] = self._table(flat, span.walk)
        return whole._replace(bias=table.data_ptr())

    def _table(self, flat: ContiguousView, walk: Sequence[int] | None) -> Tensor:
        """Of the layers that run, 0 where slot 0 is another position's: float32 [layers, Hq]."""
        added = self.added if walk is None else self.added[list(walk)]
        if not flat.gaps:
            return added.contiguous()
        held = added.new_ones((len(flat.layers), flat.layers[0].shape.heads), dtype=torch.bool)
        for row, layer in zip(held, flat.layers):
            (slab,) = layer.slabs
            if slab.positions is not None:
                row &= slab.positions[:, 0] == 0
        return added * held.repeat_interleave(added.shape[1] // held.shape[1], 1)
