"""Shapes of draft trees without a model: a Markov table says what may follow."""

from __future__ import annotations

import torch

from phasewise.request.params import Params
from phasewise.request.request import Request
from phasewise.speculation.tree_drafter import DraftBuilder, NodeRequest, TreeShape

LAST = 0


def grown(
    shape: TreeShape, table: torch.Tensor, *, room: int | None = None, seed: int = 0, greedy: bool = False
) -> DraftBuilder:
    """A tree below token LAST; rows of `table` [V, V] are what may follow a token."""
    params = Params(max_tokens=99, seed=seed, temperature=0.0 if greedy else 1.0)
    tree = DraftBuilder(
        Request([LAST], params), shape.levels, shape.nodes(shape.levels) if room is None else room, greedy
    )
    asked, level, runs = [-1], 0, 0
    while asked and level < shape.levels:
        asked = shape.grow(
            tree, [NodeRequest(node, table[tree.draft.tokens[node] if node >= 0 else LAST]) for node in asked]
        )
        level += 1
        if level < shape.levels:
            runs += len(asked)
    assert runs <= shape.runs(shape.levels - 1), "more is asked than memory was taken for"
    return tree


def worth(table: torch.Tensor, path: tuple[int, ...]) -> float:
    """The chance of a path."""
    chance, last = 1.0, LAST
    for token in path:
        chance, last = chance * float(table[last, token]), token
    return chance
