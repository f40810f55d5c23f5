"""A second model that follows the engine's requests with KV of its own: draft models, amateurs, little models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from phasewise.kv.cache import KV
from phasewise.kv.store import Store
from phasewise.request.counters import Counters
from phasewise.step.forward import forward
from phasewise.step.phase import Hidden, Phase
from phasewise.step.span import Span

if TYPE_CHECKING:
    from phasewise.model.model import Model
    from phasewise.request.request import Request


class Follower:
    """What a companion holds of one request, in the request's drawer: KV of the request's first `base` tokens (which
    never change again), then of the tokens in `tail`."""

    def __init__(self, kv: KV) -> None:
        self.kv = kv
        self.base = 0
        self.tail: list[int] = []

    @property
    def rows(self) -> int:
        return self.base + len(self.tail)

    def fork(self) -> Follower:
        twin = Follower(self.kv.fork())
        twin.base, twin.tail = self.base, list(self.tail)
        return twin

    def close(self) -> None:
        self.kv.close()


class Companion:
    """Computes logits of a second model after any continuation of a request, recomputing only what changed.

    For whom it is `optional` (a drafter's mostly is), nobody makes way when memory is short: ask `reserve` first.
    """

    def __init__(self, name: str, model: Model, store: Store, phase: Phase, counters: Counters) -> None:
        self.name, self.model, self.store, self.phase = name, model, store, phase
        self.counters = counters  # the engine's; the companion's own passes are counted apart
        self.own = Counters()
        self.optional: Callable[[Request], bool] = lambda request: False

    # ---- memory
    def growth(self, request: Request, rows: int) -> int:
        """Bytes that following `rows` tokens would take from the budget."""
        follower: Follower | None = request.state.get(self.name)
        return self.store.cost(rows) if follower is None else follower.kv.growth(max(1, rows - follower.rows))

    def reserve(self, request: Request, rows: int) -> bool:
        """Take the memory for `rows` tokens now; False if the budget has no room for it."""
        if not self.store.room(self.growth(request, rows)):
            return False
        follower = self._follower(request, rows)
        follower.kv.reserve(max(1, rows - follower.rows))
        return True

    # ---- computing
    def lag(self, request: Request) -> int:
        """How many known tokens of the request are still to be computed here."""
        follower: Follower | None = request.state.get(self.name)
        if follower is None:
            return request.known
        ahead = request.tokens[follower.base :]
        return len(ahead) - common(follower.tail, ahead)

    def follow(self, requests: Sequence[Request], paths: Sequence[Sequence[int]]) -> Tensor:
        """Logits float32 [n, V] after each request's tokens and then its path. Costs what is new, not what is long."""
        spans = []
        for request, path in zip(requests, paths):
            follower = self._follower(request, request.known + len(path))
            ahead = [*request.tokens[follower.base :], *path]
            shared = min(common(follower.tail, ahead), len(ahead) - 1)
            spans.append(self._span(request, follower, follower.base + shared, ahead[shared:]))
            follower.base, follower.tail = request.known - 1, [request.tokens[-1], *path]
        return self._logits(spans)

    def advance(self, requests: Sequence[Request], sequences: Sequence[Sequence[int]]) -> Tensor:
        """Logits float32 [n, V] after each whole sequence, which need not be the request's own (compared in full)."""
        spans = []
        for request, tokens in zip(requests, sequences):
            follower = self._follower(request, len(tokens))
            shared = min(common([*request.tokens[: follower.base], *follower.tail], tokens), len(tokens) - 1)
            spans.append(self._span(request, follower, shared, list(tokens[shared:])))
            follower.base, follower.tail = 0, list(tokens)
        return self._logits(spans)

    def catch_up(self, requests: Sequence[Request], most: int) -> None:
        """Compute the next tokens of requests that lag behind, at most `most` of each and never the last known one."""
        spans = []
        for request in requests:
            follower = self._follower(request, request.known)
            start = request.known - self.lag(request)
            end = min(start + most, request.known - 1)
            spans.append(self._span(request, follower, start, request.tokens[start:end]))
            follower.base, follower.tail = end, []
        self._forward(spans)

    def _span(self, request: Request, follower: Follower, start: int, tokens: Sequence[int]) -> Span:
        """`tokens` at positions `start` and on; rows of other tokens there are dropped."""
        if start < follower.rows:
            follower.kv.drop_last(start)
        follower.kv.reserve(len(tokens))
        return Span(request, follower.kv, self.phase, tokens, range(start, start + len(tokens)))

    def _forward(self, spans: Sequence[Span]) -> Hidden:
        try:
            hidden = forward(self.model, spans, self.own)
        except Exception:
            for span in spans:  # what they hold is no longer what they say: they start again if tried again
                span.request.state.pop(self.name).close()
            raise
        self.counters.draft_forwards += 1
        for span in spans:
            span.kv.commit(span.rows)
        return hidden

    def _logits(self, spans: Sequence[Span]) -> Tensor:
        x = self._forward(spans).x
        return self.model.head(x[torch.tensor([span.start + span.rows - 1 for span in spans], device=x.device)])

    def _follower(self, request: Request, tokens: int) -> Follower:
        follower: Follower | None = request.state.get(self.name)
        if follower is None:
            follower = request.state[self.name] = Follower(self.store.open(request, tokens))
        return follower


def common(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the longest common prefix."""
    n = min(len(a), len(b))
    if list(a[:n]) == list(b[:n]):
        return n
    return next(i for i in range(n) if a[i] != b[i])
