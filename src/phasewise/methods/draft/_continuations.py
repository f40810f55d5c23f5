"""Shared parts of drafters that copy: copies of a text, and many continuations counted into one tree."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from phasewise.verbs.draft import Draft

NOTHING = -1  # no token: a continuation ends before it


def copied(tokens: Sequence[int], start: int, length: int) -> list[int]:
    """`length` tokens from `start` on; where the text ends, the copy goes on with what it has copied."""
    out: list[int] = []
    for at in range(start, start + length):
        out.append(tokens[at] if at < len(tokens) else out[at - len(tokens)])
    return out


def heaviest(rows: NDArray[np.integer], nodes: int) -> Draft:
    """The `nodes` beginnings that most of the continuations `rows` [n, length] share, heaviest first.

    Of equally heavy ones the shorter come first, then those of earlier rows. So every beginning comes after its own
    beginnings, and the tree may be cut anywhere.
    """
    found: list[tuple[int, int, int, int, tuple[int, int]]] = []  # -weight, depth, row, token, (level, parent)
    at = np.arange(len(rows))
    group = np.zeros(len(rows), dtype=np.int64)
    for depth in range(rows.shape[1]):
        tokens = rows[at, depth].astype(np.int64)
        at, group, tokens = at[tokens != NOTHING], group[tokens != NOTHING], tokens[tokens != NOTHING]
        if not len(at):
            break
        _, first, own, weight = np.unique(
            group << 32 | tokens, return_index=True, return_inverse=True, return_counts=True
        )
        best = np.lexsort((at[first], -weight))[:nodes]  # what is lighter than so many here is not among the best
        for place in best.tolist():
            row = int(first[place])
            key = (depth - 1, int(group[row]))
            found.append((-int(weight[place]), depth, int(at[row]), int(tokens[row]), key))
        new = np.full(len(weight), -1)
        new[best] = np.arange(len(best))
        group = new[own]
        at, group = at[group >= 0], group[group >= 0]
    return _tree(found, nodes)


def _tree(found: list[tuple[int, int, int, int, tuple[int, int]]], nodes: int) -> Draft:
    names, level = list[tuple[int, int]](), dict[int, int]()
    for _, depth, *_ in found:
        names.append((depth, level.get(depth, 0)))
        level[depth] = names[-1][1] + 1
    order = sorted(range(len(found)), key=lambda i: found[i][:3])[:nodes]
    places = {names[i]: place for place, i in enumerate(order)}
    return Draft([found[i][3] for i in order], [places.get(found[i][4], -1) for i in order])
