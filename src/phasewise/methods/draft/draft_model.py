"""A smaller model with the same vocabulary guesses ahead (arXiv 2211.17192, 2302.01318); as exact as its verifier."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from phasewise.errors import UserError
from phasewise.speculation.branching import branch
from phasewise.speculation.grower import Asked, Grower, Tree, grower
from phasewise.verbs.draft import Draft, Drawn
from phasewise.verbs.host import Host


@dataclass(frozen=True)
class DraftModel:
    """A chain of `k` tokens; with `branches` > 1 every level has that many guesses, of which the first is followed up.

    So a tree costs the draft model no more rows than a chain: `k` per step and request. Guesses obey the request's own
    sampling rules; the first of a level is drawn with the very random number the target would use there
    (arXiv 2408.07978), so that `match` too accepts a good draft. Where tokens are the same with any draft, a request
    goes on without one if there is no memory for the draft model's KV. Left out: a length adapted to the acceptance
    rate; trees that follow up several guesses of a level are `rsd` and `dyspec`.
    """

    model: str = "pocket-draft"
    k: int = 4
    branches: int = 1
    drawn: Literal["without_replacement", "iid", "top_plus_one", "point"] = "without_replacement"
    chunk: int = 512  # prompt tokens the draft model computes per step while it lags behind

    paper: ClassVar[str] = "arXiv 2211.17192"
    guarantee: ClassVar[str] = "distribution"
    needs: ClassVar[str] = "second model"
    neutral: ClassVar[dict[str, object]] = {}

    def __post_init__(self) -> None:
        for knob in ("k", "branches", "chunk"):
            if getattr(self, knob) < 1:
                raise UserError(f"draft_model: {knob}={getattr(self, knob)} must be at least 1")

    def bind(self, host: Host) -> Grower:
        return grower(host, "draft_model", self.model, _Spine(self.k, self.branches, self.drawn), self.chunk)


@dataclass(frozen=True)
class _Spine:
    """Of every level's guesses the first is followed up."""

    levels: int
    branches: int
    drawn: Drawn

    def nodes(self, levels: int) -> int:
        return levels * self.branches

    def runs(self, levels: int) -> int:
        return levels

    def grow(self, tree: Tree, asked: Sequence[Asked]) -> list[int]:
        ((node, q),) = asked
        drawn = "point" if tree.point else self.drawn
        tokens, rows = branch(q, min(self.branches, tree.left), drawn, tree.us(node))
        added = [tree.add(node, token, None if rows is None else rows[i]) for i, token in enumerate(tokens)]
        return added[:1] if tree.left else []

    def finish(self, tree: Tree) -> Draft:
        return tree.draft(self.drawn)
