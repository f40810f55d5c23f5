"""Continuations merged into the tree of their heaviest beginnings."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from phasewise.methods.draft._continuations import NOTHING, heaviest

ROWS = st.lists(st.lists(st.integers(0, 3), min_size=5, max_size=5), min_size=1, max_size=30)
ENDS = st.lists(st.integers(0, 5), min_size=30, max_size=30)


@given(rows=ROWS, ends=ENDS, nodes=st.integers(1, 12))
def test_the_heaviest_beginnings_are_kept(rows: list[list[int]], ends: list[int], nodes: int) -> None:
    """Held against counting every beginning of every row; ties: shorter, then of the earlier row."""
    texts = [row[:end] for row, end in zip(rows, ends)]
    counts = Counter(tuple(text[:n]) for text in texts for n in range(1, len(text) + 1))
    first = {path: next(i for i, t in enumerate(texts) if tuple(t[: len(path)]) == path) for path in counts}
    want = sorted(counts, key=lambda path: (-counts[path], len(path), first[path]))[:nodes]
    array = np.array([text + [NOTHING] * (5 - len(text)) for text in texts])
    draft = heaviest(array, nodes)
    assert [draft.path(node) for node in range(len(draft.tokens))] == want
    assert all(-1 <= parent < node for node, parent in enumerate(draft.parents))
