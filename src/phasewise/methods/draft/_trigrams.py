"""Counts of what follows two tokens: counted once in a datastore, then adapted to what is being written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from phasewise.methods.draft._continuations import NOTHING
from phasewise.methods.draft._datastore import Datastore

Row = dict[int, float]  # token -> weight, of what follows one pair
Table = dict[int, Row]  # plain data: rows that were adapted, the one that was longest ago first

MERGED = 32  # bits of a pair's second token


def pair(first: int, second: int) -> int:
    return first << MERGED | second


def ranked(row: Row) -> list[tuple[int, float]]:
    """Heaviest first; of equally heavy tokens the smaller id."""
    return sorted(row.items(), key=lambda each: (-each[1], each[0]))


@dataclass(frozen=True)
class Trigrams:
    """`pairs` int64 [pairs], ascending; what follows pair i is in `tokens` int32 and `weights` float64 from `starts[i]`
    up to `starts[i + 1]` (int64 [pairs + 1]), heaviest first: the shares of the `kept` most frequent tokens."""

    pairs: NDArray[np.int64]
    starts: NDArray[np.int64]
    tokens: NDArray[np.int32]
    weights: NDArray[np.float64]

    @classmethod
    def of(cls, store: Datastore, kept: int) -> Trigrams:
        """Count, in one sweep: in a suffix array equal trigrams stand side by side."""
        text = np.asarray(store.tokens)
        at = np.asarray(store.order)
        at = at[at < len(text) - 2]
        first, second, third = (text[at + i].astype(np.int64) for i in range(3))
        whole = (first != NOTHING) & (second != NOTHING) & (third != NOTHING)
        keys, third = (first << MERGED | second)[whole], third[whole]
        new = np.flatnonzero(np.diff(keys, prepend=-1) | np.diff(third, prepend=-1))
        counts = np.diff(np.append(new, len(keys)))
        keys, third = keys[new], third[new]
        order = np.lexsort((third, -counts, keys))
        keys, third, counts = keys[order], third[order], counts[order]
        pairs, starts, size = np.unique(keys, return_index=True, return_counts=True)
        shares = counts / np.repeat(np.add.reduceat(counts, starts), size) if len(pairs) else counts.astype(float)
        most = np.arange(len(keys)) - np.repeat(starts, size) < kept
        ends = np.cumsum(np.minimum(size, kept))
        return cls(pairs, np.concatenate(([0], ends)), third[most].astype(np.int32), shares[most])

    def row(self, key: int) -> Row:
        """A new row; empty where the pair was never seen."""
        i = int(np.searchsorted(self.pairs, key))
        if i == len(self.pairs) or self.pairs[i] != key:
            return {}
        own = slice(self.starts[i], self.starts[i + 1])
        return dict(zip(self.tokens[own].tolist(), self.weights[own].tolist()))


@dataclass(frozen=True)
class Rule:
    """Every trigram of a text's end gets `step` more weight, `cap` at most; a row keeps `kept` tokens, a table `pairs`
    rows: what is lightest, and what was adapted longest ago, goes."""

    step: float
    cap: float
    kept: int
    pairs: int

    def adapt(self, table: Table, base: Trigrams, text: Sequence[int]) -> None:
        """Rows are copied from `base` when they are first touched; one that has gone is as in `base` again."""
        for first, second, token in zip(text, text[1:], text[2:]):
            key = pair(first, second)
            row = table.pop(key, None)
            if row is None:
                row = base.row(key)
            if token not in row and len(row) >= self.kept:
                del row[ranked(row)[-1][0]]
            row[token] = min(self.cap, row.get(token, 0.0) + self.step)
            table[key] = row
        while len(table) > self.pairs:
            del table[next(iter(table))]
