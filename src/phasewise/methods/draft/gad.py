"""A small masked model fills the next `k` places in one pass (generalised aggressive decoding, GAD, arXiv 2205.10350,
2203.16487); exact under every verifier that keeps chosen guesses exact."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from phasewise.errors import UserError
from phasewise.methods.draft._block_length import LengthRule
from phasewise.methods.draft._masked_block import MaskedBlockDrafter, masked_block_drafter
from phasewise.methods.draft._path_search import PathSearch
from phasewise.speculation.heads.diffuspec_layout import MOST
from phasewise.speculation.heads.folder import AUTO
from phasewise.verbs.host import Host
from phasewise.verbs.method import Method
from phasewise.verbs.traits import Traits

NAME = "gad"


@dataclass(frozen=True)
class GAD(Method):
    """A chain of `k` guesses: the likeliest token of each of `k` masks behind the text, all from one pass.

    The text up to the first guess that is not accepted stays, the model's own token follows, and `k` new masks behind
    it. `verify=top_beta` is the paper's acceptance, one of the `beta` likeliest tokens that is at most `tau` less
    likely than the best; its `beta=1` is exact, as all exact verifiers are. The draft model is that of
    `draft.diffuspec`, which needs no source text beside the one that is continued; `heads` names it as there. The paper
    has `k` = 25, for translations of an encoder-decoder model.
    """

    heads: str = AUTO
    k: int = 8
    chunk: int = 512  # prompt tokens the draft model computes per step while it lags behind

    paper: ClassVar[str] = "arXiv 2205.10350"
    guarantee: ClassVar[str] = "exact"
    needs: ClassVar[str] = "trained"
    neutral: ClassVar[dict[str, object]] = {}
    tight: ClassVar[dict[str, object]] = {"k": 4}

    def __post_init__(self) -> None:
        if not 1 <= self.k <= MOST:
            raise UserError(f"{NAME}: k={self.k} must be from 1 to {MOST}")
        if self.chunk < 1:
            raise UserError(f"{NAME}: chunk={self.chunk} must be at least 1")

    @property
    def traits(self) -> Traits:
        return Traits("draft", drawn=False, max_nodes=self.k)

    def bind(self, host: Host) -> MaskedBlockDrafter:
        search, length = PathSearch(1.0, 1, 1, 1.0, greedy=True), LengthRule(self.k, self.k, 0, 0.0)
        return masked_block_drafter(host, NAME, self.heads, search, length, self.chunk)
