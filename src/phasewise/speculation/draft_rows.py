"""Rows of a draft tree in a second model's KV, computed level by level, before it is known which of them stay."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from phasewise.verbs.draft import Draft


class DraftRows:
    """A draft whose node i is uncommitted row i behind a request's tokens. `depths`: how many nodes are above each."""

    __slots__ = ("_sees", "depths", "draft")

    def __init__(self) -> None:
        self.draft = Draft([], [])
        self.depths: list[int] = []
        self._sees: Tensor | None = None  # bool [nodes, nodes]; None while each node sees all before it

    def __len__(self) -> int:
        return len(self.depths)

    def add(self, tokens: Sequence[int], parents: Sequence[int]) -> Tensor | None:
        """Adds nodes below those that are there (-1: below the request's tokens). Returns what they see, bool
        [new, nodes]; None if that is every node so far, and itself."""
        first, rows = len(self), len(tokens)
        assert all(-1 <= parent < first for parent in parents), "the nodes of one level do not see each other"
        before = self._sees
        self.draft.tokens += tokens
        self.draft.parents += parents
        self.depths += [0 if parent < 0 else self.depths[parent] + 1 for parent in parents]
        if rows == 1 and parents[0] == first - 1 and before is None:
            return None
        if before is None:
            before = torch.ones(first, first, dtype=torch.bool).tril_()
        sees = torch.zeros(first + rows, first + rows, dtype=torch.bool)
        sees[:first, :first] = before
        below = torch.tensor([at for at, parent in enumerate(parents) if parent >= 0], dtype=torch.int64)
        sees[first + below, :first] = before[[parent for parent in parents if parent >= 0]]
        sees.diagonal().fill_(True)
        self._sees = sees
        return sees[first:]
