"""Drafts what others wrote after the same words: continuations found in a datastore, merged into a tree. Exact under
every verifier that keeps chosen guesses exact, no model, no training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from torch import Tensor

from phasewise.errors import UserError
from phasewise.methods.draft._continuations import heaviest
from phasewise.methods.draft._datastore import LIBRARY, ORDERED, Datastore, named
from phasewise.request.request import Request
from phasewise.step.phase import Hidden
from phasewise.step.span import Span
from phasewise.verbs.decode import Outcome
from phasewise.verbs.draft import Draft, Drafter, headroom
from phasewise.verbs.host import ENDLESS, Host
from phasewise.verbs.method import Method
from phasewise.verbs.traits import Traits


@dataclass(frozen=True)
class Retrieval(Method):
    """The longest end of the text that occurs in a datastore, and what followed there: the `nodes` beginnings that most
    of its continuations share.

    `store`: `library` (Python's own, made once per tokenizer, in seconds, and kept where caches lie), a folder that
    `phasewise datastore` made, or `random:SEED`. `hits` continuations of `length` tokens are counted; of more, so many
    evenly spread.
    """

    store: str = LIBRARY
    nodes: int = 16
    longest: int = ORDERED  # tokens of a match
    shortest: int = 2
    length: int = 10
    hits: int = 1000

    paper: ClassVar[str] = "arXiv 2311.08252"
    guarantee: ClassVar[str] = "exact"
    needs: ClassVar[str] = "nothing"
    neutral: ClassVar[dict[str, object]] = {}

    def __post_init__(self) -> None:
        for knob in ("nodes", "shortest", "length", "hits"):
            if getattr(self, knob) < 1:
                raise UserError(f"retrieval: {knob}={getattr(self, knob)} must be at least 1")
        if not self.shortest <= self.longest <= ORDERED:
            raise UserError(f"retrieval: longest={self.longest} must be from shortest={self.shortest} to {ORDERED}")

    @property
    def traits(self) -> Traits:
        return Traits("draft", drawn=False, max_nodes=self.nodes)

    def bind(self, host: Host) -> _Retrieval:
        return _Retrieval(self, named("retrieval", self.store, host.model))


class _Retrieval(Drafter):
    """Nothing is remembered of a request: a guess follows from its tokens."""

    def __init__(self, method: Retrieval, store: Datastore) -> None:
        self.method, self.store = method, store

    def size(self, request: Request) -> int:
        return self.method.nodes if headroom(request) > 0 else 0

    def reach(self, context: int) -> int:
        return ENDLESS

    def draft(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Draft | None]:
        return [self._guess(request, budget) for request, budget in zip(requests, budgets)]

    def learn(
        self, spans: Sequence[Span], hidden: Hidden, outcomes: Sequence[Outcome], tops: Tensor | None = None
    ) -> None:
        pass

    def _guess(self, request: Request, budget: int) -> Draft | None:
        method = self.method
        length, nodes = min(method.length, headroom(request)), min(method.nodes, budget)
        if length < 1 or nodes < 1:
            return None
        _, places = self.store.find(request.tokens[-method.longest :], method.shortest, method.longest)
        if len(places) > method.hits:
            places = places[np.arange(method.hits) * len(places) // method.hits]
        return heaviest(self.store.continuations(places, length), nodes) if len(places) else None
