"""A smaller model with the same vocabulary guesses ahead (arXiv 2211.17192, 2302.01318); as exact as its verifier."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from phasewise.errors import UserError
from phasewise.methods.draft._chain import ChainShape
from phasewise.speculation.tree_drafter import TreeDrafter, tree_drafter
from phasewise.verbs.host import Host
from phasewise.verbs.method import Method
from phasewise.verbs.traits import Traits


@dataclass(frozen=True)
class DraftModel(Method):
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

    @property
    def shape(self) -> ChainShape:
        return ChainShape(self.k, self.branches, self.drawn)

    @property
    def traits(self) -> Traits:
        return Traits("draft", max_nodes=self.shape.nodes(self.shape.levels))

    def bind(self, host: Host) -> TreeDrafter:
        return tree_drafter(host, "draft_model", self.model, self.shape, self.chunk)
