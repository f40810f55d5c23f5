"""Several independent continuations by a draft model (SpecTr, arXiv 2310.15141), for the verifier `k_seq`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from phasewise.errors import UserError
from phasewise.speculation.branching import branch
from phasewise.speculation.tree_drafter import DraftBuilder, NodeRequest, TreeDrafter, tree_drafter
from phasewise.verbs.draft import Draft, Drawn
from phasewise.verbs.host import Host
from phasewise.verbs.method import Method
from phasewise.verbs.traits import Traits


@dataclass(frozen=True)
class SpecTr(Method):
    """`chains` continuations of `k` tokens, each drawn by itself: what the paper's rule, `--verify k_seq`, was made
    for.

    Equal beginnings are one row of the draft model's, and each keeps its own row of the target's. Guesses for greedy
    requests begin with the `chains` likeliest tokens. Left out: nothing of the paper's algorithm.
    """

    model: str = "pocket-draft"
    chains: int = 4
    k: int = 4
    chunk: int = 512  # prompt tokens the draft model computes per step while it lags behind

    paper: ClassVar[str] = "arXiv 2310.15141"
    guarantee: ClassVar[str] = "distribution"
    needs: ClassVar[str] = "second model"
    neutral: ClassVar[dict[str, object]] = {}

    def __post_init__(self) -> None:
        for knob in ("chains", "k", "chunk"):
            if getattr(self, knob) < 1:
                raise UserError(f"spectr: {knob}={getattr(self, knob)} must be at least 1")

    @property
    def shape(self) -> _Chains:
        return _Chains(self.chains, self.k)

    @property
    def traits(self) -> Traits:
        return Traits("draft", max_nodes=self.shape.nodes(self.shape.levels))

    def bind(self, host: Host) -> TreeDrafter:
        return tree_drafter(host, "spectr", self.model, self.shape, self.chunk)


@dataclass(frozen=True)
class _Chains:
    """`notes` of a tree: which of the chains each node belongs to."""

    count: int
    levels: int
    drawn: Drawn = "iid"

    def nodes(self, levels: int) -> int:
        return self.count * levels

    def runs(self, levels: int) -> int:
        return self.nodes(levels)

    def grow(self, tree: DraftBuilder, asked: Sequence[NodeRequest]) -> list[int]:
        drawn: Drawn = "point" if tree.point else "iid"
        added: list[int] = []
        if asked[0].node < 0:
            ((node, q),) = asked
            tokens, rows = branch(q, min(self.count, tree.left), drawn, tree.us(node), tree.coupling)
            for chain, token in enumerate(tokens):
                added.append(tree.add(node, token, None if rows is None else rows[chain]))
                tree.notes[added[-1]] = chain
            return added if tree.left else []
        for node, q in asked[: tree.left]:
            chain = tree.notes[node]
            us = tree.us(node)
            (token,), _ = branch(q, 1, drawn, lambda _, us=us, chain=chain: us(chain), tree.coupling)  # type: ignore[misc]
            added.append(tree.add(node, token, None if tree.point else q))
            tree.notes[added[-1]] = chain
        return added if tree.left else []

    def finish(self, tree: DraftBuilder) -> Draft:
        return tree.finish("iid")
