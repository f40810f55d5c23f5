"""What has been grown below a request's tokens in a second model's KV: a tree whose rows wait for a verdict."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Grown:
    """Nodes in the order of their rows. `depths`: how many nodes are above each."""

    __slots__ = ("_sees", "depths", "parents", "tokens")

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.depths: list[int] = []
        self._sees: Tensor | None = None  # bool [nodes, nodes]; None while each node sees all before it

    def add(self, tokens: Sequence[int], parents: Sequence[int]) -> Tensor | None:
        """New nodes, below those that are there (-1: below the request's tokens). -> what they see, bool
        [new, nodes]; None if that is every node so far, and itself."""
        first, rows = len(self.tokens), len(tokens)
        assert all(-1 <= parent < first for parent in parents), "the nodes of one level do not see each other"
        before = self._sees
        self.tokens += tokens
        self.parents += parents
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

    def path(self, tokens: Sequence[int]) -> list[int]:
        """The nodes, from the top, whose tokens are the longest beginning of `tokens` that was grown."""
        ends, node = [-1], -1
        for token in tokens:
            ends = [i for i, parent in enumerate(self.parents) if parent in ends and self.tokens[i] == token]
            if not ends:
                break
            node = ends[0]
        path = []
        while node >= 0:
            path.append(node)
            node = self.parents[node]
        return path[::-1]
