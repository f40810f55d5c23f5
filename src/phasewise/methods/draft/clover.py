"""Tiny trees by heads whose state takes in each guess, behind one layer more (Clover, arXiv 2405.00263)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from phasewise.errors import UserError
from phasewise.methods.draft._pruned import PrunedTree
from phasewise.methods.draft._regressive import RegressiveDrafter, regressive_drafter
from phasewise.speculation.heads.clover import CloverHeads
from phasewise.speculation.heads.folder import AUTO
from phasewise.speculation.heads.layouts import feature_heads
from phasewise.verbs.host import Host
from phasewise.verbs.method import Method
from phasewise.verbs.traits import Traits

MOST = 63  # guesses: with the pending token 64 rows


@dataclass(frozen=True)
class Clover(Method):
    """A tree of at most `nodes` guesses for batches of many requests, `depth` in a row; 0: as many as there are heads.

    A decoder layer behind the model's last one runs once a draft, over the tokens accepted since, and gives a state.
    For each token after it an attention decoder makes the next state: it adds the token's value, by the cosine of the
    state's query and the token's key. An MLP for each depth and the model's own output matrix make guesses of a state.

    Children of a guess are the likeliest tokens whose probabilities together reach `top_p`, but for those below `floor`
    times the likeliest. Of a level the likeliest are proposed, by the product of all probabilities down to each. A
    level takes what the levels before have left of `nodes`. So sure guesses make a chain and unsure ones a fan.

    `heads`: `auto`, which is those that lie beside the model or are shipped for it; a folder, such as `phasewise train
    heads clover` makes; or `random:SEED`, which guesses nothing. Guesses are chosen, not drawn: where a request
    samples, the token that the model would draw by the heads' probabilities takes the place of the likeliest. Left out:
    Clover-2 (arXiv 2408.00264), which has a second attention decoder before its blocks and an output projection.
    """

    heads: str = AUTO
    depth: int = 0
    nodes: int = 4
    top_p: float = 0.9
    floor: float = 0.25
    chunk: int = 512  # prompt tokens the augmenting block reads per step while it lags behind

    paper: ClassVar[str] = "arXiv 2405.00263"
    guarantee: ClassVar[str] = "exact"
    needs: ClassVar[str] = "trained"
    neutral: ClassVar[dict[str, object]] = {}
    tight: ClassVar[dict[str, object]] = {"nodes": 5, "top_p": 0.9, "floor": 0.01}

    def __post_init__(self) -> None:
        for knob, least in (("depth", 0), ("nodes", 1)):
            if not least <= getattr(self, knob) <= MOST:
                raise UserError(f"clover: {knob}={getattr(self, knob)} must be from {least} to {MOST}")
        for knob in ("top_p", "floor"):
            if not 0 <= getattr(self, knob) <= 1:
                raise UserError(f"clover: {knob}={getattr(self, knob)} must be from 0 to 1")
        if self.chunk < 1:
            raise UserError(f"clover: chunk={self.chunk} must be at least 1")

    @property
    def traits(self) -> Traits:
        return Traits("draft", drawn=False, max_nodes=self.nodes)

    def shape(self, levels: int) -> PrunedTree:
        """The trees of at most so many levels."""
        return PrunedTree(levels, self.nodes, self.nodes, top_p=self.top_p, floor=self.floor)

    def bind(self, host: Host) -> RegressiveDrafter:
        heads, key = feature_heads(host.model, ("clover",), self.heads)
        assert isinstance(heads, CloverHeads)
        if self.depth > heads.guesses:
            raise UserError(f"clover: depth={self.depth} is too much: these heads guess up to {heads.guesses} tokens "
                            "in a row")  # fmt: skip
        return regressive_drafter(host, "clover", heads, key, self.shape(self.depth or heads.guesses), self.chunk)
