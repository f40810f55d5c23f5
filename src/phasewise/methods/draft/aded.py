"""Trees from what follows two tokens, in a corpus and ever more in the text itself (ADED, arXiv 2407.12021): no second
model, no training; exact under every verifier that keeps chosen guesses exact."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import ClassVar, Literal

from torch import Tensor

from phasewise.errors import UserError
from phasewise.methods.draft._datastore import LIBRARY, named
from phasewise.methods.draft._tree_search import MonteCarlo, best_first
from phasewise.methods.draft._trigrams import Rule, Table, Trigrams, pair, ranked
from phasewise.request.request import Request
from phasewise.step.phase import Hidden
from phasewise.step.span import Span
from phasewise.verbs.decode import Outcome
from phasewise.verbs.draft import Draft, Drafter, headroom
from phasewise.verbs.host import ENDLESS, Host
from phasewise.verbs.method import Method
from phasewise.verbs.sample import Purpose, uniform
from phasewise.verbs.traits import Traits

NAME = "aded"
CAP = 3.0  # the most weight that a trigram gets


@dataclass(frozen=True)
class Aded(Method):
    """A table says what follows two tokens: at first the shares of the 12 most frequent tokens in `store` (`library`:
    Python's own; a folder that `phasewise datastore` made; or `random:SEED`). With every verdict each trigram of the
    last `window` tokens gets `step` more weight, so that what was written lately outweighs the corpus.

    mode=mcts is the paper's search of the table: `rounds` walks of at most `length` tokens, the most visited beginnings
    each with the likeliest token after it. mode=heap takes the `nodes` likeliest continuations of at most length + 1
    tokens straight away: three in four of them are the same, the eight best all are, and it looks at a tenth as many
    rows of the table.

    At most `pairs` rows are adapted: then the one that was longest ago is as in the corpus again. scope=engine shares
    the table among requests, as the paper does; they then show in each other's counters, never in each other's tokens:
    a verifier under which they might is refused. Left out: the paper's verifier, which is not exact where tokens are
    drawn, and its table of 253 MB.
    """

    mode: Literal["heap", "mcts"] = "heap"
    store: str = LIBRARY
    nodes: int = 24
    length: int = 4
    rounds: int = 150  # mode=mcts alone
    window: int = 16
    step: float = 0.04
    kept: int = 12
    pairs: int = 1024
    scope: Literal["request", "engine"] = "request"

    paper: ClassVar[str] = "arXiv 2407.12021"
    guarantee: ClassVar[str] = "exact"
    needs: ClassVar[str] = "nothing"
    neutral: ClassVar[dict[str, object]] = {}

    def __post_init__(self) -> None:
        for knob, least in (("nodes", 1), ("length", 1), ("rounds", 1), ("window", 3), ("kept", 1), ("pairs", 1)):
            if getattr(self, knob) < least:
                raise UserError(f"aded: {knob}={getattr(self, knob)} must be at least {least}")
        if not 0 <= self.step <= CAP:
            raise UserError(f"aded: step={self.step} must be from 0 (the corpus alone) to {CAP}")
        for knob, known in (("mode", ("heap", "mcts")), ("scope", ("request", "engine"))):
            if getattr(self, knob) not in known:
                raise UserError(f"aded: {knob}={getattr(self, knob)} must be {' or '.join(known)}")

    @property
    def traits(self) -> Traits:
        return Traits("draft", drawn=False, max_nodes=self.nodes, learns_across=self.scope == "engine")

    def bind(self, host: Host) -> AdedRun:
        return AdedRun(self, Trigrams.of(named(NAME, self.store, host.model), self.kept))


class AdedRun(Drafter):
    """ADED in one engine."""

    def __init__(self, method: Aded, base: Trigrams) -> None:
        self.method, self.base = method, base
        self.rule = Rule(method.step, CAP, method.kept, method.pairs)
        self.shared = method.scope == "engine"
        self.table: Table = {}  # all requests', where it is shared

    def size(self, request: Request) -> int:
        return self.method.nodes if headroom(request) > 0 and request.known > 1 else 0

    def reach(self, context: int) -> int:
        return ENDLESS

    def draft(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Draft | None]:
        return [self._guess(request, budget) for request, budget in zip(requests, budgets)]

    def learn(
        self, spans: Sequence[Span], hidden: Hidden, outcomes: Sequence[Outcome], tops: Tensor | None = None
    ) -> None:
        if not self.method.step:
            return
        for span, outcome in zip(spans, outcomes):
            if outcome.tokens:
                text = [*span.request.tokens[-self.method.window :], *outcome.tokens]
                self.rule.adapt(self._table(span.request), self.base, text[-self.method.window :])

    def _guess(self, request: Request, budget: int) -> Draft | None:
        levels, nodes = headroom(request), min(self.method.nodes, budget)
        if levels < 1 or nodes < 1 or request.known < 2:
            return None
        table, base = self._table(request), self.base
        length, end = self.method.length, (request.tokens[-2], request.tokens[-1])

        def follows(first: int, second: int) -> list[tuple[int, float]]:
            key = pair(first, second)
            row = table.get(key)
            return ranked(base.row(key) if row is None else row)

        if self.method.mode == "heap":
            return best_first(follows, end, nodes, min(length + 1, levels))
        seed, position, index = request.params.seed, request.known, count()
        walks = MonteCarlo(
            follows, end, min(length, levels), lambda: uniform(seed, position, Purpose.METHOD, next(index))
        )
        walks.search(self.method.rounds)
        return walks.draft(nodes).prune(levels)

    def _table(self, request: Request) -> Table:
        if self.shared:
            return self.table
        table: Table = request.state.setdefault(NAME, {})
        return table
