"""Clover's tree (arXiv 2405.00263): few guesses a request, chosen by how likely all guesses down to each are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from phasewise.methods.draft._likeliest import LikeliestTree
from phasewise.speculation.tree_drafter import DraftBuilder, NodeRequest
from phasewise.verbs.draft import Draft


@dataclass(frozen=True)
class PrunedTree(LikeliestTree):
    """A tree of at most `most` nodes, `levels` deep, which is made level by level and never trimmed again.

    Of what may follow a node, the likeliest tokens are kept whose probabilities together reach `top_p`; those below
    `floor` times the likeliest are dropped. Of all that is kept on a level, the likeliest are added, by the product of
    the probabilities down to each. A level may use all nodes that the levels before have left.

    `notes` of a tree: how likely each node is, by all guesses down to it.
    """

    top_p: float = 0.5
    floor: float = 0.25

    def nodes(self, levels: int) -> int:
        return self.most if levels > 0 else 0

    def runs(self, levels: int) -> int:
        return self.most if levels > 0 else 0

    def grow(self, tree: DraftBuilder, asked: Sequence[NodeRequest]) -> list[int]:
        chances = torch.stack([self._coupled(tree, each) for each in asked])
        top, at = chances.topk(min(tree.left, chances.shape[1]), -1)
        return self.add(tree, [each.node for each in asked], top.tolist(), at.tolist())

    def add(
        self, tree: DraftBuilder, nodes: Sequence[int], top: Sequence[Sequence[float]], at: Sequence[Sequence[int]]
    ) -> list[int]:
        """Adds children of the nodes of a level. `top` and `at`: of each node the probabilities of the likeliest tokens
        in falling order, at least as many as the tree has room for, and the tokens. Returns all that were added, none
        where the tree is full."""
        notes, left = tree.notes or {-1: 1.0}, tree.left
        offered = [
            (notes[node] * chance, node, token)
            for node, of, named in zip(nodes, top, at, strict=True)
            for chance, token in zip(self.kept(of[:left]), named)
        ]
        offered.sort(key=lambda offer: -offer[0])  # of equal ones the earlier
        added = list[int]()
        for likely, node, token in offered[:left]:
            added.append(tree.add(node, token))
            tree.notes[added[-1]] = likely
        return added if tree.left else []

    def kept(self, chances: Sequence[float]) -> list[float]:
        """The beginning of the likeliest tokens' probabilities, in falling order, whose tokens are offered."""
        found, total = list[float](), 0.0
        for chance in chances:
            if chance <= 0 or chance < self.floor * chances[0]:
                break
            found.append(chance)
            total += chance
            if total >= self.top_p:
                break
        return found

    def finish(self, tree: DraftBuilder) -> Draft:
        return tree.finish(self.drawn)
