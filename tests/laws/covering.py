"""Covering arrays of strength 2: few rows in which any two values of different factors meet. Greedy, deterministic."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations
from typing import TypeVar

import numpy as np

T = TypeVar("T")


def covering(
    factors: Sequence[Sequence[T]], allowed: Callable[[T, T], bool] = lambda a, b: True
) -> list[tuple[T, ...]]:
    """Rows of one value per factor that cover every allowed pair, and hold no other.

    At least as many as the two largest factors have pairs, and with the sizes of ours hardly more. The first value of
    a factor must go with everything, so that any pair can be completed. Raises ValueError if it does not.
    """
    wishes = _Wishes([len(values) for values in factors])
    for f, g in combinations(range(len(factors)), 2):
        for i, a in enumerate(factors[f]):
            for j, b in enumerate(factors[g]):
                if not allowed(a, b):
                    if 0 in (i, j):
                        raise ValueError(f"{a} and {b} exclude one another, but the first of a factor goes with all")
                    wishes.exclude(f, i, g, j)
    rows = []
    while wishes.left:
        rows.append(wishes.row(len(rows)))
    return [tuple(factors[f][i] for f, i in enumerate(row)) for row in rows]


class _Wishes:
    """The pairs still to be covered, and those that must not be: bool [values of f, values of g] for all f != g."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = sizes
        self.wanted: dict[tuple[int, int], np.ndarray] = {}
        self.banned: dict[tuple[int, int], np.ndarray] = {}
        for f, g in combinations(range(len(sizes)), 2):
            for table, value in ((self.wanted, True), (self.banned, False)):
                table[f, g] = np.full((sizes[f], sizes[g]), value)
                table[g, f] = table[f, g].T  # a view: both change together

    @property
    def left(self) -> int:
        return sum(int(self.wanted[pair].sum()) for pair in combinations(range(len(self.sizes)), 2))

    def exclude(self, f: int, i: int, g: int, j: int) -> None:
        self.wanted[f, g][i, j], self.banned[f, g][i, j] = False, True

    def row(self, turn: int) -> list[int]:
        """A row that covers many wishes, one at least: one of the pair of factors with most of them, then greedily."""
        f, g = max(combinations(range(len(self.sizes)), 2), key=lambda pair: int(self.wanted[pair].sum()))
        open_ = self.wanted[f, g]
        i = int(open_.sum(1).argmax())
        row = {f: i, g: self._best(g, {f: i}, turn, open_[i])}
        while len(row) < len(self.sizes):
            rest = [h for h in range(len(self.sizes)) if h not in row]
            h = max(rest, key=lambda h: sum(int(self.wanted[h, k].sum()) for k in range(len(self.sizes)) if k != h))
            row[h] = self._best(h, row, turn)
        for a, b in combinations(sorted(row), 2):
            self.wanted[a, b][row[a], row[b]] = False
        return [row[h] for h in range(len(self.sizes))]

    def _best(self, f: int, row: dict[int, int], turn: int, among: np.ndarray | None = None) -> int:
        """The value of `f` that goes with the row so far and covers most with it; of equal ones, that with most wishes
        left, then another one each turn."""
        new = sum(self.wanted[f, g][:, j] for g, j in row.items()).astype(float)
        later = sum(self.wanted[f, g].sum(1) for g in range(len(self.sizes)) if g not in row and g != f)
        new = new + later / (1 + sum(self.sizes))
        for g, j in row.items():
            new[self.banned[f, g][:, j]] = -1.0
        if among is not None:
            new[~among] = -1.0
        shift = turn % self.sizes[f]
        return int((np.roll(new, -shift).argmax() + shift) % self.sizes[f])
