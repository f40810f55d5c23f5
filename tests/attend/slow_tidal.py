"""TidalDecode by the book: every row and head by itself, the picks kept as sets of positions."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from phasewise.ops import attention as ops
from phasewise.step.read import Read
from tests.asking import Asking


class SlowTidal(Asking):
    """Without correction. `picks`: (layer, head, position) -> what the last layer that picks chose for that row; of
    rows that share a position, the last one's."""

    def __init__(self, k: int, dense: int, second: int) -> None:
        self.k, self.dense, self.choosing = k, dense, (dense, second)
        self.picks: dict[tuple[int, int, int], set[int]] = {}
        self._now: dict[tuple[int, int, int], set[int]] = {}  # by span, row and head

    def __call__(self, reads: Sequence[Read]) -> list[Tensor]:
        return [self.one(read) if read.layer >= self.dense else read.attend() for read in reads]

    def one(self, read: Read) -> Tensor:
        (heads, n), rows = read.part.size, read.q.shape[0]
        mask = read.mask()
        seen = torch.ones(heads, rows, n, dtype=torch.bool) if mask is None else mask.expand(heads, rows, n)
        positions = read.part.positions.expand(heads, n)
        select, out = torch.zeros(heads, rows, n, dtype=torch.bool), []
        for r, at in enumerate(read.q_positions.tolist()):
            own = n - rows + r
            k = read.part.k.clone()
            if read.view is not None and read.view.moved is not None:
                slots, delta = read.view.moved
                if int(delta[r]):
                    k[:, slots] = read.step.model.rotate(read.layer, k[:, slots], delta[r])
            for h in range(heads):
                head = h if read.part.heads is None else int(read.part.heads[h])
                visible = torch.nonzero(seen[h, r])[:, 0].tolist()
                if at <= self.k or read.layer in self.choosing:
                    select[h, r, visible] = True
                if read.layer in self.choosing:
                    q = read.q[r].view(heads, -1, read.q.shape[2])[h]
                    best = self.choose(q, k[h], visible, own, read.scale)
                    self._now[id(read.span), r, head] = {int(positions[h, slot]) for slot in best}
                elif at > self.k:
                    mine = self._now[id(read.span), r, head]
                    chosen = [slot for slot in visible if int(positions[h, slot]) in mine or slot == own]
                    assert len(chosen) <= self.k + 1
                    select[h, r, chosen] = True
                self.picks[read.layer, head, at] = set(self._now[id(read.span), r, head])
            out.append(ops.reference(read.q[r : r + 1], k, read.part.v, select[:, r : r + 1], read.scale)[0])
        return torch.cat(out)

    def choose(self, q: Tensor, k: Tensor, visible: list[int], own: int, scale: float) -> list[int]:
        """q [G, D], k [N, D] -> slots."""
        weights = ((q @ k[visible].T) * scale).softmax(-1).amax(0).tolist()
        ranked = sorted((-weight, slot) for weight, slot in zip(weights, visible) if slot != own)
        return [slot for _, slot in ranked[: self.k]]
