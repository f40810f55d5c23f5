"""EAGLE-2's tree (arXiv 2406.16858): the likeliest nodes, by all guesses down to each, of what a drafter offers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from phasewise.speculation.tree_drafter import DraftBuilder, NodeRequest
from phasewise.verbs.draft import Draft, Drawn
from phasewise.verbs.sample import pick


@dataclass(frozen=True)
class LikeliestTree:
    """The `most` likeliest nodes of a tree in which every level follows up `width` nodes, with `width` guesses each.

    `notes` of a tree: how likely each node is, by all guesses down to it. A node that is not among the likeliest so far
    never will be, nor will what is below it; so neither is added.
    """

    levels: int
    width: int
    most: int
    drawn: Drawn = "point"

    def nodes(self, levels: int) -> int:
        offered = self.width + max(0, levels - 1) * self.width**2
        return min(self.most, offered)

    def runs(self, levels: int) -> int:
        return self.width * levels

    def grow(self, tree: DraftBuilder, asked: Sequence[NodeRequest]) -> list[int]:
        notes = tree.notes or {-1: 1.0}
        chances = torch.stack([self._coupled(tree, each) for each in asked])
        width = min(self.width, chances.shape[1])
        top, at = chances.topk(width, -1)
        guesses, tokens = top.tolist(), at.tolist()
        offered = sorted(
            (
                (notes[each.node] * guess, each.node, token)
                for each, of, named in zip(asked, guesses, tokens, strict=True)
                for guess, token in zip(of, named, strict=True)
            ),
            key=lambda offer: -offer[0],
        )  # of equal ones the earlier
        added = list[int]()
        for likely, node, token in offered[: tree.room]:
            if likely > 0:
                added.append(tree.add(node, token))
                tree.notes[added[-1]] = likely
        best = set(self._best(tree))
        return [node for node in added[: self.width] if node in best]

    @staticmethod
    def _coupled(tree: DraftBuilder, asked: NodeRequest) -> Tensor:
        """Probabilities [V] of what follows a node. Where the request samples, the token that the target would draw
        from them, with its own random number, has the chance of the likeliest, and that one its."""
        if tree.request.params.greedy:
            return asked.q
        token, best = pick(asked.q, tree.us(asked.node)(0), tree.coupling), int(asked.q.argmax())
        chances = asked.q.clone()
        chances[[token, best]] = chances[[best, token]]
        return chances

    def _best(self, tree: DraftBuilder) -> list[int]:
        """The likeliest nodes, in order of their numbers. None is likelier than its parent, which has a smaller number:
        so this is a tree."""
        ranked = sorted(range(len(tree.draft.tokens)), key=lambda node: (-tree.notes[node], node))
        return sorted(ranked[: tree.room])

    def finish(self, tree: DraftBuilder) -> Draft:
        return tree.finish(self.drawn).only(self._best(tree))
