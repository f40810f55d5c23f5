"""Drafting from one row a request: an augmenting block runs once, then a small decoder makes a state of each guess
(Clover, arXiv 2405.00263).

Only the augmenting block has keys and values, and none of its rows is a guess's. So all of them stay, and a tree costs
one pass, however many levels it has. A guess is a product with a few matrices and with the model's output matrix.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from phasewise.methods.draft._pruned import PrunedTree
from phasewise.model.model import Model
from phasewise.request.request import Request
from phasewise.speculation.companion import NewNodes
from phasewise.speculation.feature_model import FeatureModel
from phasewise.speculation.features import FeatureCompanion, FeatureDrafter, Features, follower
from phasewise.speculation.heads.clover import CloverHeads, token_rows
from phasewise.speculation.tree_drafter import DraftBuilder, TreeShape
from phasewise.verbs.host import Host


class RegressiveModel(FeatureModel):
    """Clover's heads beside their target, which lends them its output matrix, and its rows as embeddings of tokens."""

    heads: CloverHeads

    def __init__(self, heads: CloverHeads, target: Model, key: str) -> None:
        super().__init__(heads, target, key)
        # where tokens enter the target by the output matrix, its embeddings are these rows up to a factor
        self._rows = None if target.config.tied else token_rows(target.unembed.dense()).to(self.dtype)

    def embedded(self, tokens: Sequence[int]) -> Tensor:
        """Rows [n, d] of tokens as the attention decoder reads them."""
        ids = torch.tensor(tokens, device=self.device)
        return token_rows(self.target.embed(ids)) if self._rows is None else F.embedding(ids, self._rows)

    def inputs(self, tokens: Sequence[int], features: Tensor) -> Tensor:
        """The rows that enter the augmenting block: the features [n, d] alone."""
        return features

    def onward(self, states: Tensor, tokens: Sequence[int]) -> Tensor:
        """States [n, d] one step on, each with the token that was guessed after it."""
        return self.heads.onward(states, self.embedded(tokens))

    def said(self, step: int, states: Tensor) -> Tensor:
        """Logits float32 [n, V] of states s_{step + 1} [n, d]."""
        return self._by_target(self.heads.read(step, states))


class RegressiveCompanion(FeatureCompanion):
    """A companion whose guesses are no rows of its own. `root` and `grow` give states of the attention decoder; all
    that are asked for at once are of one level."""

    model: RegressiveModel

    def follow(self, features: Features) -> RegressiveCompanion:
        super().follow(features)
        self.step = 0  # of the states given last: the MLP that reads them
        self._states = torch.empty(0)  # [rows, d] of the drafts that grow
        self._places: dict[str, list[int]] = {}  # by request: its rows there, the root's first, then its nodes'
        return self

    def root(self, requests: Sequence[Request]) -> Tensor:
        begun = self.model.heads.begun(super().root(requests))
        states = self.model.onward(begun, [request.tokens[-1] for request in requests])
        self.step, self._states = 0, states
        self._places = {request.id: [row] for row, request in enumerate(requests)}
        return states

    def grow(self, levels: Sequence[NewNodes]) -> Tensor:
        """States [all new nodes, d], request by request, each of its parent's state and its own token."""
        self.step += 1
        above = [self._places[level.request.id][at + 1] for level in levels for at in level.parents]
        rows = torch.tensor(above, device=self._states.device)
        states = self.model.onward(self._states[rows], [token for level in levels for token in level.tokens])
        row = len(self._states)
        for level in levels:
            self._places[level.request.id] += range(row, row + len(level.tokens))
            row += len(level.tokens)
        self._states = torch.cat((self._states, states))
        return states

    def logits(self, x: Tensor) -> Tensor:
        return self.model.said(self.step, x)


class RegressiveDrafter(FeatureDrafter):
    """The runtime of drafters whose guesses need no memory."""

    companion: RegressiveCompanion

    def _runs(self, levels: int) -> int:
        return 0

    def _grow(self, trees: Sequence[DraftBuilder]) -> None:
        """Trees of requests that are greedy without any rule grow by a few calls for all of them. Others grow as those
        of any second model do, to the same guesses."""
        if self.thoughts or not isinstance(self.shape, PrunedTree) or not all(t.request.params.plain for t in trees):
            super()._grow(trees)
            return
        x = self.companion.root([tree.request for tree in trees])
        asked, level = [(tree, [-1]) for tree in trees], 1
        while asked:
            chances = self.companion.logits(x).softmax(-1)
            if level == 1:
                for tree, own in zip(trees, chances):
                    tree.thoughts = {(): own}
            added = self._added(asked, chances, self.shape)
            asked = [(tree, nodes) for tree, nodes in added if nodes and level < tree.levels]
            if asked:
                x = self.companion.grow([_new(tree, nodes) for tree, nodes in asked])
            level += 1

    @staticmethod
    def _added(
        asked: Sequence[tuple[DraftBuilder, list[int]]], chances: Tensor, shape: PrunedTree
    ) -> list[tuple[DraftBuilder, list[int]]]:
        """The nodes added below those asked for, tree by tree. chances [all nodes, V]: of what may follow."""
        most = min(max(tree.left for tree, _ in asked), chances.shape[1])
        top, at = (each.tolist() for each in chances.topk(most, -1))
        found, row = list[tuple[DraftBuilder, list[int]]](), 0
        for tree, nodes in asked:
            end = row + len(nodes)
            found.append((tree, shape.add(tree, nodes, top[row:end], at[row:end])))
            row = end
        return found


def _new(tree: DraftBuilder, nodes: Sequence[int]) -> NewNodes:
    """Nodes of a draft as what a companion is to add. Every node of a level before has been added to it, too."""
    draft = tree.draft
    return NewNodes(tree.request, [draft.tokens[node] for node in nodes], [draft.parents[node] for node in nodes])


def regressive_drafter(
    host: Host, name: str, heads: CloverHeads, key: str, shape: TreeShape, chunk: int
) -> RegressiveDrafter:
    """Makes the runtime of a drafter called `name` with Clover's heads, whose weights `key` names."""
    made = follower(host, name, RegressiveModel(heads, host.model, key), RegressiveCompanion)
    return RegressiveDrafter(host, made, shape, chunk)
