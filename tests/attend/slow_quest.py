"""Quest by the book: every row by itself, every bound from scratch, in the order of the paper."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from phasewise.ops import attention as ops
from phasewise.step.read import Read
from tests.asking import Asking


class SlowQuest(Asking):
    """What each row selects is appended to `selected`: (layer, head, position) -> positions read."""

    def __init__(self, page: int, budget: int, dense_layers: int) -> None:
        self.page, self.most, self.dense_layers = page, max(budget, 3 * page), dense_layers
        self.selected: dict[tuple[int, int, int], list[int]] = {}

    def __call__(self, reads: Sequence[Read]) -> list[Tensor]:
        return [read.attend() if read.layer < self.dense_layers else self.one(read) for read in reads]

    def one(self, read: Read) -> Tensor:
        (heads, n), rows = read.part.size, read.q.shape[0]
        mask = read.mask()
        seen = torch.ones(heads, rows, n, dtype=torch.bool) if mask is None else mask.expand(heads, rows, n)
        positions = read.part.positions.expand(heads, n)
        select = torch.zeros(heads, rows, n, dtype=torch.bool)
        out = []
        for r, at in enumerate(read.q_positions.tolist()):
            k, moved = read.part.k.clone(), []
            if read.view is not None and read.view.moved is not None:
                slots, delta = read.view.moved
                if int(delta[r]):
                    moved = slots.tolist()
                    k[:, slots] = read.step.model.rotate(read.layer, k[:, slots], delta[r])
            for h in range(heads):
                visible = torch.nonzero(seen[h, r])[:, 0].tolist()
                q = read.q[r].view(heads, -1, read.q.shape[2])[h]
                select[h, r, self.choose(q, k[h], positions[h].tolist(), at, visible, moved)] = True
                head = h if read.part.heads is None else int(read.part.heads[h])
                self.selected[read.layer, head, at] = sorted(positions[h, select[h, r]].tolist())
            out.append(ops.reference(read.q[r : r + 1], k, read.part.v, select[:, r : r + 1], read.scale)[0])
        return torch.cat(out)

    def choose(
        self, q: Tensor, k: Tensor, positions: list[int], at: int, visible: list[int], moved: list[int]
    ) -> list[int]:
        """q [G, D], k [N, D] -> slots. Moved rows and the row's own page are read in any case."""
        pages: dict[int, list[int]] = {}
        for slot in visible:
            pages.setdefault(-1 if slot in moved else positions[slot] // self.page, []).append(slot)
        own = at // self.page
        chosen = [slot for page, slots in pages.items() if page == -1 or page >= own for slot in slots]
        rivals = {page: slots for page, slots in pages.items() if -1 < page < own}

        def bound(slots: list[int]) -> float:
            low, high = k[slots].amin(0), k[slots].amax(0)
            return float(torch.maximum(q * low, q * high).sum(-1).max())

        for slots in sorted(rivals.values(), key=bound, reverse=True):
            if len(chosen) + len(slots) > self.most:
                break
            chosen.extend(slots)
        return chosen
