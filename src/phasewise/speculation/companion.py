"""A second model that follows the engine's requests with KV of its own: draft models, amateurs, little models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from phasewise.kv.cache import KV
from phasewise.kv.store import Store
from phasewise.request.counters import Counters
from phasewise.request.drawer import Drawer
from phasewise.speculation.draft_rows import DraftRows
from phasewise.step.forward import forward
from phasewise.step.phase import Hidden, Phase
from phasewise.step.span import Span

if TYPE_CHECKING:
    from phasewise.model.model import Model
    from phasewise.request.request import Request


@dataclass(frozen=True, slots=True)
class NewNodes:
    """Nodes to be added to the draft of one request, all of one level. `parents` number the nodes that were added
    before; -1: the last known token."""

    request: Request
    tokens: Sequence[int]
    parents: Sequence[int]


class SecondModelKV(Drawer):
    """The KV that a companion holds of one request, in the request's drawer: rows of the first `base` tokens of what it
    reads (which never change again), then of the tokens in `tail`; then, `uncommitted`, those of a draft."""

    def __init__(self, kv: KV) -> None:
        self.kv = kv
        self.base = 0
        self.tail: list[int] = []
        self.uncommitted = DraftRows()

    @property
    def rows(self) -> int:
        return self.base + len(self.tail)

    def settle(self, tokens: Sequence[int]) -> None:
        """Commits the draft's rows that are the request's tokens, and drops the others."""
        if not len(self.uncommitted):
            return
        draft = self.uncommitted.draft
        path = draft.longest(tokens[self.rows :])
        self.kv.commit(len(path) if path == list(range(len(path))) else path)
        self.tail += [draft.tokens[node] for node in path]
        self.uncommitted = DraftRows()

    def fork(self) -> SecondModelKV:
        self.settle([])
        twin = SecondModelKV(self.kv.fork())
        twin.base, twin.tail = self.base, list(self.tail)
        return twin

    def close(self) -> None:
        self.kv.close()


class Companion:
    """Computes logits of a second model after any continuation of a request, recomputing only what changed.

    For whom it is `optional` (a drafter's mostly is), nobody makes way when memory is short: ask `reserve` first. What
    it reads of a request is its `text`: the request's tokens, or others that grow at the end as these do. What grows
    may be computed by a `rough` model of the same KV; if `calibrated`, none of its rows ever stays.
    """

    def __init__(self, name: str, model: Model, store: Store, phase: Phase, counters: Counters) -> None:
        self.name, self.model, self.store, self.phase = name, model, store, phase
        self.counters = counters  # the engine's; the companion's own passes are counted apart
        self.own = Counters()
        self.optional: Callable[[Request], bool] = lambda request: False
        self.rough: Model | None = None
        self.calibrated = False
        self.text: Callable[[Request], Sequence[int]] = lambda request: request.tokens
        self.done: Callable[[Request], bool] = lambda request: False  # it follows a request no further

    # ---- memory
    def growth(self, request: Request, rows: int) -> int:
        """Bytes that following it until it has `rows` tokens would take from the budget."""
        if self.done(request):
            return 0
        follower, rows = self._held(request), self._read(request, rows)
        return self.store.cost(rows) if follower is None else follower.kv.growth(max(1, rows - follower.rows))

    def reserve(self, request: Request, rows: int) -> bool:
        """Take the memory until it has `rows` tokens now; False if the budget has no room for it."""
        if not self.store.room(self.growth(request, rows)):
            return False
        rows = self._read(request, rows)
        follower = self._follower(request, rows)
        follower.kv.reserve(max(1, rows - follower.rows))
        return True

    # ---- computing
    def lag(self, request: Request) -> int:
        """Returns the number of known tokens of its text that are still to be computed here."""
        follower, text = self._held(request), self.text(request)
        if follower is None:
            return len(text)
        ahead = text[follower.base :]
        return len(ahead) - common(follower.tail, ahead)

    def root(self, requests: Sequence[Request]) -> Tensor:
        """Rows of the last layer [n, d] after each request's text, below which `grow` may go on."""
        return self._ends(self._ahead(requests))

    def logits(self, x: Tensor) -> Tensor:
        """Logits float32 [n, V] of what `root` or `grow` has given."""
        return self.model.head(x)

    def _ahead(self, requests: Sequence[Request]) -> list[Span]:
        """A span of what is still to be computed of each request's text, its last token at least; once these have run,
        all of it is computed."""
        spans = []
        for request in requests:
            text = self.text(request)
            follower = self._follower(request, len(text))
            ahead = text[follower.base :]
            shared = min(common(follower.tail, ahead), len(ahead) - 1)
            spans.append(self._span(request, follower, follower.base + shared, ahead[shared:]))
            follower.base, follower.tail = len(text) - 1, [*text[-1:]]
        return spans

    def grow(self, levels: Sequence[NewNodes]) -> Tensor:
        """Rows of the last layer [all new nodes, d], request by request: one pass for a level of all trees. Each row
        sees its ancestors alone, and none is computed twice.

        The memory must have been reserved, and `root` have come before. The rows stay uncommitted until
        something else is asked: then those of the tokens that the request went on with are committed, and the others
        dropped.
        """
        return self._forward([self._below(level) for level in levels], self.rough).x

    def _below(self, level: NewNodes) -> Span:
        follower: SecondModelKV = level.request.state[self.name]
        rows, first = follower.uncommitted, len(follower.uncommitted)
        sees = rows.add(level.tokens, level.parents)
        start = follower.rows
        chain = range(start + first, start + first + 1)
        positions = chain if sees is None else [start + depth for depth in rows.depths[first:]]
        return Span(level.request, follower.kv, self.phase, level.tokens, positions, sees, first=first)

    def advance(self, requests: Sequence[Request], sequences: Sequence[Sequence[int]]) -> Tensor:
        """Logits float32 [n, V] after each whole sequence, which need not be the request's own (compared in full)."""
        spans = []
        for request, tokens in zip(requests, sequences):
            follower = self._follower(request, len(tokens))
            shared = min(common([*self.text(request)[: follower.base], *follower.tail], tokens), len(tokens) - 1)
            spans.append(self._span(request, follower, shared, list(tokens[shared:])))
            follower.base, follower.tail = 0, list(tokens)
        return self._logits(spans)

    def catch_up(self, requests: Sequence[Request], most: int) -> None:
        """Compute the next tokens of requests that lag behind, at most `most` of each and never the last known one."""
        spans = []
        for request in requests:
            text = self.text(request)
            follower = self._follower(request, len(text))
            start = len(text) - self.lag(request)
            end = min(start + most, len(text) - 1)
            spans.append(self._span(request, follower, start, text[start:end]))
            follower.base, follower.tail = end, []
        self._take_in(spans)

    def between(self, request: Request, start: int, stop: int) -> list[tuple[Tensor, Tensor]]:
        """Keys and values [H, r, D] of every layer, of tokens of its text that were computed here."""
        follower: SecondModelKV = request.state[self.name]
        parts = [layer.read()[0] for layer in follower.kv.layers]
        return [part.between(start, stop) for part in parts]

    def forget(self, request: Request) -> None:
        """Give back what is held of a request, which has no more use for it."""
        follower: SecondModelKV | None = request.state.pop(self.name, None)
        if follower is not None:
            follower.close()

    def _span(self, request: Request, follower: SecondModelKV, start: int, tokens: Sequence[int]) -> Span:
        """`tokens` at positions `start` and on; rows of other tokens there are dropped."""
        if start < follower.rows:
            follower.kv.drop_last(start)
        follower.kv.reserve(len(tokens))
        return Span(request, follower.kv, self.phase, tokens, range(start, start + len(tokens)))

    def _forward(self, spans: Sequence[Span], rough: Model | None = None) -> Hidden:
        model = rough or self.model
        try:
            hidden = forward(model, spans, self.own)
        except Exception:
            for span in spans:  # what they hold is no longer what they say: they start again if tried again
                span.request.state.pop(self.name).close()
            raise
        self.counters.draft_forwards += 1
        self.counters.draft_depth += model.depth
        return hidden

    def _take_in(self, spans: Sequence[Span]) -> None:
        """Keeps what rows are made of texts, which stay."""
        self._committed(spans)

    def _committed(self, spans: Sequence[Span]) -> Hidden:
        hidden = self._forward(spans)
        for span in spans:
            span.kv.commit(span.rows)
        return hidden

    def _ends(self, spans: Sequence[Span]) -> Tensor:
        x = self._committed(spans).x
        return x[torch.tensor([span.start + span.rows - 1 for span in spans], device=x.device)]

    def _logits(self, spans: Sequence[Span]) -> Tensor:
        return self.model.head(self._ends(spans))

    def _held(self, request: Request) -> SecondModelKV | None:
        follower: SecondModelKV | None = request.state.get(self.name)
        if follower is not None:
            follower.settle([] if self.calibrated else self.text(request))
        return follower

    def _read(self, request: Request, tokens: int) -> int:
        """Returns the length of its text once it has so many tokens."""
        return tokens + len(self.text(request)) - request.known

    def _follower(self, request: Request, tokens: int) -> SecondModelKV:
        follower = self._held(request)
        if follower is None:
            follower = request.state[self.name] = SecondModelKV(self.store.open(request, tokens))
        return follower


def common(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the longest common prefix."""
    n = min(len(a), len(b))
    if list(a[:n]) == list(b[:n]):
        return n
    return next(i for i in range(n) if a[i] != b[i])
