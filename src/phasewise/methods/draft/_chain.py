"""A chain of a second model's guesses, with or without siblings of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from phasewise.speculation.branching import branch
from phasewise.speculation.tree_drafter import DraftBuilder, NodeRequest
from phasewise.verbs.draft import Draft, Drawn


@dataclass(frozen=True)
class ChainShape:
    """A tree that follows up the first guess of every level: a chain."""

    levels: int
    branches: int
    drawn: Drawn

    def nodes(self, levels: int) -> int:
        return levels * self.branches

    def runs(self, levels: int) -> int:
        return levels

    def grow(self, tree: DraftBuilder, asked: Sequence[NodeRequest]) -> list[int]:
        ((node, q),) = asked
        drawn = "point" if tree.point else self.drawn
        tokens, rows = branch(q, min(self.branches, tree.left), drawn, tree.us(node), tree.coupling)
        added = [tree.add(node, token, None if rows is None else rows[i]) for i, token in enumerate(tokens)]
        return added[:1] if tree.left else []

    def finish(self, tree: DraftBuilder) -> Draft:
        return tree.finish(self.drawn)
