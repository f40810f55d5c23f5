"""The model drafts for itself with sub-layers left out, on its own KV (SWIFT, arXiv 2410.06916)."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from phasewise.errors import UserError
from phasewise.methods.draft._skipset import Search, Sites, Stops
from phasewise.model.thinned import Thinned
from phasewise.request.request import Request
from phasewise.speculation.branching import branch
from phasewise.speculation.tails import Tails
from phasewise.speculation.tree_drafter import DraftBuilder, NodeRequest, TreeDrafter
from phasewise.step.phase import Hidden
from phasewise.step.span import Span
from phasewise.verbs.decode import Outcome
from phasewise.verbs.draft import Draft, Drafter, Drawn
from phasewise.verbs.host import ENDLESS, Host
from phasewise.verbs.method import Method
from phasewise.verbs.sample import pick
from phasewise.verbs.traits import Traits

MOST = 63  # nodes: with the pending token 64 rows
WIDTHS = ((0.5, 10), (0.8, 8), (0.95, 5), (1.0, 3))  # up to this confidence so many guesses for one token


@dataclass(frozen=True)
class Swift(Method):
    """A chain of at most `steps` guesses by the model without a share `ratio` of its attentions and MLPs, the first and
    the last layer excepted. It reads the KV of the whole model and writes behind that; what it wrote is dropped before
    the verdict. The chain ends after a guess whose probability is below `confidence`. Beside every guess stand the next
    likeliest tokens, 3 to 10 in all by its confidence, at most `branches`; 63 guesses in all.

    Which sub-layers are left out is looked for while text is generated: in every round in which there is room for the
    rows, another set is scored by how many of a request's first `window` + 1 tokens it would have said, all in one
    pass. Most are drawn at random, every `bayes`-th comes from a Gaussian process. The best one so far drafts, for all
    requests. The search ends above `enough`, after `patience` sets without a better one, or after `proposals`; it
    begins with every second layer.

    Guesses are chosen, not drawn; where a request samples, the chain takes what the target would draw by the rough
    probabilities. Which ones are made hangs on all requests so far, so lossy verifiers are refused. Where a skip method
    has freed layers' KV nothing is guessed. In 16 bits guessing passes are native calls; scores go operator by
    operator. Left out: coordinates between 0 and 1 in the Gaussian process; siblings drawn without replacement, with
    which a request's sampled tokens would hang on what the search has found in others'.
    """

    ratio: float = 0.45
    steps: int = 25
    confidence: float = 0.8
    branches: int = 10
    window: int = 32
    bayes: int = 25
    enough: float = 0.95
    patience: int = 300
    proposals: int = 1000

    paper: ClassVar[str] = "arXiv 2410.06916"
    guarantee: ClassVar[str] = "exact"
    needs: ClassVar[str] = "nothing"
    neutral: ClassVar[dict[str, object]] = {}
    traits: ClassVar[Traits] = Traits("draft", drawn=False, learns_across=True)
    tight: ClassVar[dict[str, object]] = {"steps": 4, "confidence": 0.1, "branches": 2, "window": 6, "bayes": 3}

    def __post_init__(self) -> None:
        for knob, most in (("steps", MOST), ("branches", WIDTHS[0][1]), ("window", MOST)):
            if not 1 <= getattr(self, knob) <= most:
                raise UserError(f"swift: {knob}={getattr(self, knob)} must be from 1 to {most}")
        for knob in ("ratio", "confidence", "enough"):
            if not 0 <= getattr(self, knob) <= 1:
                raise UserError(f"swift: {knob}={getattr(self, knob)} must be from 0 to 1")
        for knob, least in (("bayes", 1), ("patience", 1), ("proposals", 0)):
            if getattr(self, knob) < least:
                raise UserError(f"swift: {knob}={getattr(self, knob)} must be at least {least}")

    def bind(self, host: Host) -> SelfDrafter:
        stops = Stops(self.enough, self.patience, self.proposals)
        search = Search(host.model.config.layers, self.ratio, self.bayes, stops)
        shape = _Confident(self.steps, self.branches, self.confidence, frozenset(host.model.config.eos))
        return SelfDrafter(host, search, shape, self.window)


class SelfDrafter(Drafter):
    """SWIFT in one engine; what it has found is every request's."""

    def __init__(self, host: Host, search: Search, shape: _Confident, window: int) -> None:
        self.host, self.search, self.window = host, search, window
        self.companion: Tails = Tails("swift", self._thinned(search.best).packed(), host.counters)
        self.drafter = TreeDrafter(host, self.companion, shape, ENDLESS)

    def size(self, request: Request) -> int:
        return self.drafter.size(request)

    def think(self) -> bool:
        return self.drafter.think()

    def draft(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Draft | None]:
        if not self.search.done:
            self._look(requests)
        tails = self.companion
        with tails.lent(requests):
            return self.drafter.draft(requests, [min(b, tails.room(r)) for r, b in zip(requests, budgets)])

    def learn(
        self, spans: Sequence[Span], hidden: Hidden, outcomes: Sequence[Outcome], tops: Tensor | None = None
    ) -> None:
        pass  # what was generated stands in the requests

    def _look(self, requests: Sequence[Request]) -> None:
        """Score one set, on a request that has come far enough, and the same one while it is there."""
        ready = [r for r in requests if r.n_out > self.window <= self.companion.room(r)]
        if ready:
            request = next((r for r in ready if r.id == self.search.text), ready[0])
            sites, before = self.search.propose(request.id), self.search.best
            self.search.note(sites, self.score(request, sites))
            if self.search.best != before:
                self.companion.model = self._thinned(self.search.best).packed()

    def score(self, request: Request, sites: Sites) -> float:
        """The share of `window` generated tokens that the model without these sub-layers would have said after the
        ones before, on the whole model's KV of the prompt."""
        start = request.prompt_len
        said = self.host.model.best(self.companion.replay(request, start, start + self.window, self._thinned(sites)))
        told = request.tokens[start + 1 : start + 1 + self.window]
        return sum(a == b for a, b in zip(said, told)) / self.window

    def take(self, sites: Sites) -> None:
        """Leave these out from now on; the search is over."""
        self.search.best, self.search.done = sites, True
        self.companion.model = self._thinned(sites).packed()

    def _thinned(self, sites: Sites) -> Thinned:
        return Thinned(self.host.model, self.search.route(sites))


@dataclass(frozen=True)
class _Confident:
    """A chain that ends where a guess is unlikely, or ends the text (`eos`), with siblings of each; the more, the less
    likely it is."""

    levels: int
    branches: int
    confidence: float
    eos: frozenset[int]
    drawn: Drawn = "point"

    def nodes(self, levels: int) -> int:
        return min(MOST, levels * self.branches)

    def runs(self, levels: int) -> int:
        return levels

    def grow(self, tree: DraftBuilder, asked: Sequence[NodeRequest]) -> list[int]:
        ((node, q),) = asked
        params = tree.request.params
        token = int(q.argmax()) if params.greedy else pick(q, tree.us(node)(0), tree.coupling)
        sure = float(q[token])
        width = min(self.branches, WIDTHS[bisect_left(WIDTHS, (min(sure, 1.0),))][1], tree.left)
        others, _ = branch(q, width, "point", tree.us(node), tree.coupling)
        chain = tree.add(node, token)
        for other in [other for other in others if other != token][: width - 1]:
            tree.add(node, other)
        ends = token in params.stop_tokens or (token in self.eos and not params.ignore_eos)
        return [chain] if tree.left and sure >= self.confidence and not ends else []

    def finish(self, tree: DraftBuilder) -> Draft:
        return tree.finish(self.drawn)
