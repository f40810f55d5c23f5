"""A small masked model fills a block in one pass, and a search finds the path through it (DiffuSpec, arXiv
2510.02358); exact under every verifier that keeps chosen guesses exact."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from phasewise.errors import UserError
from phasewise.methods.draft._block_length import LengthRule
from phasewise.methods.draft._masked_block import MaskedBlockDrafter, masked_block_drafter
from phasewise.methods.draft._path_search import PathSearch
from phasewise.speculation.heads.diffuspec_layout import MOST
from phasewise.speculation.heads.folder import AUTO
from phasewise.verbs.host import Host
from phasewise.verbs.method import Method
from phasewise.verbs.traits import Traits

NAME = "diffuspec"


@dataclass(frozen=True)
class DiffuSpec(Method):
    """A chain of `least` to `most` guesses by a masked draft model, which foretells all of them in one pass.

    At each place the likeliest tokens of a mass of `tau` are candidates, `candidates` of them at most, and tokens that
    end a text. A beam of `beams` paths is scored by `lam` log p + (1 - `lam`) log q, summed over places: p is the draft
    model's, q that of a 3-gram model of the texts that the target writes. `path=argmax` takes the likeliest token of
    each place.

    The block's length follows two moving averages that take `rho` of each new value: of tokens before an end token in
    the likeliest ones, and of accepted guesses. Where the second is as large as the first, `delta` is added. With
    `least` = `most` the length is fixed. What was learned of a request is lost in a preemption.

    `heads`: `auto`, which is those that lie beside the model or are shipped for it; a folder of `phasewise train heads
    diffuspec`; or `random:SEED`. The paper's models are large and see the text in both directions. This one sees it
    causally, so that its keys and values stay. `least` = 20, `most` = 30, `delta` = 10 and `lam` = 0.5 are the
    paper's, and others suit a small model. Guesses are chosen, not drawn: the paper divides by what the model says of a
    place with all later ones masked, which a path that was searched for does not follow. Left out: several denoising
    passes, which the paper found slower.
    """

    heads: str = AUTO
    least: int = 4
    most: int = 8
    delta: int = 2
    rho: float = 0.5
    path: Literal["search", "argmax"] = "search"
    beams: int = 3
    tau: float = 0.8
    candidates: int = 15
    lam: float = 0.95
    chunk: int = 512  # prompt tokens the draft model computes per step while it lags behind

    paper: ClassVar[str] = "arXiv 2510.02358"
    guarantee: ClassVar[str] = "exact"
    needs: ClassVar[str] = "trained"
    neutral: ClassVar[dict[str, object]] = {}
    tight: ClassVar[dict[str, object]] = {"least": 2, "most": 4}

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.most <= MOST:
            raise UserError(f"{NAME}: least={self.least},most={self.most}: say 1 <= least <= most <= {MOST}")
        for knob in ("beams", "candidates", "chunk"):
            if getattr(self, knob) < 1:
                raise UserError(f"{NAME}: {knob}={getattr(self, knob)} must be at least 1")
        if self.delta < 0:
            raise UserError(f"{NAME}: delta={self.delta} must be at least 0")
        if self.path not in ("search", "argmax"):
            raise UserError(f"{NAME}: path={self.path} must be search or argmax")
        for knob in ("rho", "tau", "lam"):
            if not 0 <= getattr(self, knob) <= 1:
                raise UserError(f"{NAME}: {knob}={getattr(self, knob)} must be from 0 to 1")

    @property
    def search(self) -> PathSearch:
        return PathSearch(self.tau, self.candidates, self.beams, self.lam, self.path == "argmax")

    @property
    def length(self) -> LengthRule:
        return LengthRule(self.least, self.most, self.delta, self.rho)

    @property
    def traits(self) -> Traits:
        return Traits("draft", drawn=False, max_nodes=self.most)

    def bind(self, host: Host) -> MaskedBlockDrafter:
        return masked_block_drafter(host, NAME, self.heads, self.search, self.length, self.chunk)
