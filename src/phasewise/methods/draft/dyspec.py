"""Trees that grow where a guess is likely to be accepted (DySpec, arXiv 2410.11744): one draft pass per level."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from phasewise.errors import UserError
from phasewise.speculation.branching import without
from phasewise.speculation.tree_drafter import DraftBuilder, NodeRequest, TreeDrafter, tree_drafter
from phasewise.verbs.draft import Draft, Drawn
from phasewise.verbs.host import Host
from phasewise.verbs.method import Method
from phasewise.verbs.sample import pick
from phasewise.verbs.traits import Traits

DRAWN: Drawn = "without_replacement"


@dataclass(frozen=True)
class DySpec(Method):
    """A draft model's tree of at most `nodes` guesses and `depth` levels. A guess is worth the chance, by the draft
    model, that the text comes to it; one more is drawn below a node while what is left of its worth is at least
    `theta` (0: one part in `nodes`).

    Guesses for greedy requests are the `nodes` likeliest beginnings of a continuation, those below `theta` left out.
    Left out: a pass of the draft model per guess, which the paper's heap takes; worth measured instead of believed.
    """

    model: str = "pocket-draft"
    nodes: int = 24
    depth: int = 6
    theta: float = 0.0
    chunk: int = 512  # prompt tokens the draft model computes per step while it lags behind

    paper: ClassVar[str] = "arXiv 2410.11744"
    guarantee: ClassVar[str] = "distribution"
    needs: ClassVar[str] = "second model"
    neutral: ClassVar[dict[str, object]] = {}

    def __post_init__(self) -> None:
        for knob in ("nodes", "depth", "chunk"):
            if getattr(self, knob) < 1:
                raise UserError(f"dyspec: {knob}={getattr(self, knob)} must be at least 1")
        if not 0 <= self.theta < 1:
            raise UserError(f"dyspec: theta={self.theta} must be at least 0 and below 1")

    @property
    def shape(self) -> _Worth:
        return _Worth(self.nodes, self.depth, self.theta or 1 / self.nodes)

    @property
    def traits(self) -> Traits:
        return Traits("draft", max_nodes=self.shape.nodes(self.shape.levels))

    def bind(self, host: Host) -> TreeDrafter:
        return tree_drafter(host, "dyspec", self.model, self.shape, self.chunk)


@dataclass(frozen=True)
class _Worth:
    """`notes` of a tree: what each node is worth."""

    most: int
    levels: int
    theta: float
    drawn: Drawn = DRAWN

    def nodes(self, levels: int) -> int:
        return self.most

    def runs(self, levels: int) -> int:
        return self.most * levels  # those of one level are worth no more than 1 together

    def grow(self, tree: DraftBuilder, asked: Sequence[NodeRequest]) -> list[int]:
        notes = tree.notes or {-1: 1.0}
        if tree.point:
            return self._choose(tree, asked, notes)
        added: list[int] = []
        for node, q in sorted(asked, key=lambda each: -notes[each.node]):
            added += self._draw(tree, node, q, notes[node])
        return [node for node in added if tree.left and tree.notes[node] >= self.theta]

    def _draw(self, tree: DraftBuilder, node: int, q: Tensor, worth: float) -> list[int]:
        """Children of one node. Whether there is one more is known before it is drawn.

        Nodes of a level share what is left of the budget, so the draws of one decide how many children the next one
        has. Below the first level each has numbers of its own: else what a node lacks would hang on its own numbers.
        """
        added, us, rest = list[int](), tree.us(node) if node < 0 else tree.own(node), q
        while worth >= self.theta and tree.left:
            token = pick(rest, us(len(added)), tree.coupling)
            share = float(rest[token])
            added.append(tree.add(node, token, rest))
            tree.notes[added[-1]] = worth * share
            worth *= 1 - share
            left = without(rest, [token])
            if left is None:
                break
            rest = left
        return added

    def _choose(self, tree: DraftBuilder, asked: Sequence[NodeRequest], notes: dict[int, float]) -> list[int]:
        """The best of this level; the best of all levels are chosen in the end."""
        worths = torch.stack([q.double() * notes[node] for node, q in asked])
        values, at = worths.flatten().topk(min(self.most, worths.numel()))
        added = []
        for value, index in zip(values.tolist(), at.tolist()):
            if value >= self.theta:
                place, token = divmod(index, worths.shape[1])
                added.append(tree.add(asked[place].node, token))
                tree.notes[added[-1]] = value
        best = set(self._best(tree))
        return [node for node in added if node in best]

    def _best(self, tree: DraftBuilder) -> list[int]:
        """The nodes worth most, in order of their numbers: none is worth more than its parent, so this is a tree."""
        ranked = sorted(range(len(tree.draft.tokens)), key=lambda node: -tree.notes[node])
        return sorted(ranked[: tree.room])

    def finish(self, tree: DraftBuilder) -> Draft:
        draft = tree.finish(DRAWN)
        return draft.only(self._best(tree)) if tree.point else draft
