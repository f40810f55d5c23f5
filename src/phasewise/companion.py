"""A second model that follows the engine's requests with KV of its own: draft models, amateurs, little models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from phasewise.batch import Span
from phasewise.forward import forward
from phasewise.kv.store import KV, Store
from phasewise.phase import Phase
from phasewise.trace import Counters

if TYPE_CHECKING:
    from phasewise.model.model import Model
    from phasewise.request import Request


class Follower:
    """What a companion holds of one request: KV, and the tokens it covers. Lives in the request's drawer."""

    def __init__(self, kv: KV) -> None:
        self.kv = kv
        self.tokens: list[int] = []

    def fork(self) -> Follower:
        twin = Follower(self.kv.fork())
        twin.tokens = list(self.tokens)
        return twin

    def close(self) -> None:
        self.kv.close()


class Companion:
    """Computes logits of a second model after any continuation of a request, recomputing only what changed."""

    def __init__(self, name: str, model: Model, store: Store, phase: Phase, counters: Counters) -> None:
        self.name, self.model, self.store, self.phase = name, model, store, phase
        self.counters = counters  # the engine's; the companion's own passes are counted apart
        self.own = Counters()

    def growth(self, request: Request, rows: int) -> int:
        """Bytes that following `rows` tokens would take from the budget."""
        follower = request.state.get(self.name)
        if follower is None:
            return self.store.cost(rows)
        growth: int = follower.kv.growth(max(0, rows - len(follower.tokens)))
        return growth

    def advance(self, requests: Sequence[Request], sequences: Sequence[Sequence[int]]) -> Tensor:
        """Logits float32 [n, V] after each whole sequence. Rolls back to the longest common prefix, runs the rest."""
        spans = []
        for request, tokens in zip(requests, sequences):
            follower = self._follower(request, len(tokens))
            shared = min(common(follower.tokens, tokens), len(tokens) - 1)
            if shared < len(follower.tokens):
                follower.kv.drop_last(shared)
            follower.kv.reserve(len(tokens) - shared)
            spans.append(Span(request, follower.kv, self.phase, tokens[shared:], range(shared, len(tokens))))
            follower.tokens = list(tokens)
        hidden = forward(self.model, spans, self.own)
        self.counters.draft_forwards += 1
        for span in spans:
            span.kv.commit(span.rows)
        last = torch.tensor([span.start + span.rows - 1 for span in spans], device=hidden.x.device)
        return self.model.head(hidden.x[last])

    def _follower(self, request: Request, tokens: int) -> Follower:
        if self.name not in request.state:
            computed = request.computed
            request.state[self.name] = Follower(self.store.open(request, tokens))
            request.computed = computed
        follower: Follower = request.state[self.name]
        return follower


def common(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the longest common prefix."""
    n = min(len(a), len(b))
    if list(a[:n]) == list(b[:n]):
        return n
    return next(i for i in range(n) if a[i] != b[i])
