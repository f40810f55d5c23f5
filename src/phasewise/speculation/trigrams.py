"""A smoothed 3-gram model over token ids, from a table of counted trigrams."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

WEIGHT = 50.0  # a shorter context's distribution counts as so many tokens seen after the longer one
NONE = -1  # in place of a token where a text has fewer than two


class SmoothedTrigrams:
    """P(w | u, v) = (c(u v w) + a P(w | v)) / (c(u v) + a), P(w | v) likewise over P(w), and P(w) over the uniform
    distribution (MacKay and Peto's hierarchical Dirichlet model); a = `WEIGHT`. Pairs and single tokens are counted
    where they end a trigram of the table."""

    def __init__(self, table: Tensor, vocab: int) -> None:
        """`table` int [n, 4]: three token ids below `vocab` and how often they were seen in a row, at least once."""
        self.table, self.vocab = table, vocab
        self._counts: dict[tuple[int, ...], int] = {}
        self._after: Counter[tuple[int, ...]] = Counter()  # by context, the tokens seen after it
        ends = Counter[tuple[int, ...]]()
        for first, second, third, count in table.tolist():
            self._counts[first, second, third] = count
            ends[second, third] += count
            ends[(third,)] += count
            self._after[first, second] += count
            self._after[(second,)] += count
            self._after[()] += count
        self._counts |= ends
        self._known: dict[tuple[int, int, int], float] = {}

    @classmethod
    def of(cls, texts: Iterable[Sequence[int]], vocab: int, most: int) -> SmoothedTrigrams:
        """Counts texts and keeps the `most` trigrams that are seen most often; of equal ones the smaller ids."""
        seen = Counter[tuple[int, int, int]]()
        for text in texts:
            seen.update(zip(text, text[1:], text[2:]))
        kept = sorted(seen.items(), key=lambda each: (-each[1], each[0]))[:most]
        rows = sorted((*words, count) for words, count in kept)
        return cls(torch.tensor(rows, dtype=torch.int32).view(-1, 4), vocab)

    def log_chance(self, first: int, second: int, token: int) -> float:
        """The logarithm of P(token | first, second), in nats. NONE stands for a token that is not there."""
        words = first, second, token
        found = self._known.get(words)
        if found is None:
            found = self._known[words] = math.log(self._chance(words))
        return found

    def _chance(self, words: tuple[int, ...]) -> float:
        if not words:
            return 1.0 / self.vocab
        shorter = self._chance(words[1:])
        return (self._counts.get(words, 0) + WEIGHT * shorter) / (self._after.get(words[:-1], 0) + WEIGHT)
