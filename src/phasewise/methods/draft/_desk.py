"""A draft model at work by itself: it follows texts, and says what it would go on with. It knows neither engine nor
clock, so it is the same in the engine's thread and in a process of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from phasewise import catalog
from phasewise.engine.assembly import kv_shapes
from phasewise.kv.buffer import Ledger
from phasewise.kv.format import Raw
from phasewise.kv.store import Store
from phasewise.methods.attend.dense import Dense
from phasewise.model.model import Model
from phasewise.request.counters import Counters
from phasewise.request.header import request_of
from phasewise.request.request import Request
from phasewise.speculation.companion import Companion, NewNodes, common
from phasewise.step.phase import Phase
from phasewise.verbs.sample import Context, distribution, draw

NAME = "desk"
UNBOUNDED = 1 << 62  # bytes: what lies here is in nobody's budget


@dataclass(frozen=True, slots=True)
class Order:
    """Read this text of a request, and guess so many tokens that follow it (0: read only, all but the last token).
    `about`: the request's header without its tokens."""

    key: int
    about: dict[str, Any]
    tokens: list[int]
    guesses: int


@dataclass(frozen=True, slots=True)
class Guessed:
    """Tokens that may follow a text, and what each was drawn from, float32 [tokens, V]; None: that is not told."""

    tokens: list[int] = field(default_factory=list)
    q: Tensor | None = None

    def then(self, more: Guessed) -> Guessed:
        """These, and `more` behind them. Without either's q there is none."""
        if not self.tokens or not more.tokens:
            return self if self.tokens else more
        q = None if self.q is None or more.q is None else torch.cat((self.q, more.q))
        return Guessed(self.tokens + more.tokens, q)

    def part(self, start: int, end: int | None = None) -> Guessed:
        return Guessed(self.tokens[start:end], None if self.q is None else self.q[start:end])


class Desk:
    """Orders of one call are computed together, a pass per level. A text may go on, or otherwise than it did: what it
    shares with the last one is not computed again.

    A guess is the token that the draft model would draw by the request's own sampling rules, with the very random
    number that the target draws with there. With `tells` it comes with what it was drawn from, if it was drawn.
    """

    def __init__(self, model: Model, sample: str, tells: bool = False) -> None:
        """`sample`: the text of the engine's sample method."""
        self.tells = tells
        self.sample = catalog.build("sample", sample)
        store = Store(kv_shapes(model), Raw(), ledger=Ledger(UNBOUNDED), counters=Counters())
        nobody = Phase(NAME, decode=None, attend=Dense(), adapted=False)  # type: ignore[arg-type]  # nobody decodes
        self.companion = Companion(NAME, model, store, nobody, Counters())
        self.texts: dict[int, Request] = {}

    @property
    def passes(self) -> int:
        """Passes of the draft model so far."""
        return self.companion.counters.draft_forwards

    @property
    def held(self) -> int:
        """Bytes of KV."""
        return self.companion.store.ledger.used

    def work(self, orders: Sequence[Order]) -> list[Guessed]:
        """Returns the guesses of each order."""
        with torch.inference_mode():
            texts = [self._text(order) for order in orders]
            most = max(order.guesses for order in orders)
            asked = [i for i, order in enumerate(orders) if order.guesses]
            late = [t for t, order in zip(texts, orders) if not order.guesses and self.companion.lag(t) > 1]
            if late:
                self.companion.catch_up(late, max(text.known for text in late))
            guesses: list[list[int]] = [[] for _ in orders]
            rows: list[list[Tensor]] = [[] for _ in orders]
            for level in range(most):
                self._level([i for i in asked if orders[i].guesses > level], texts, guesses, rows)
        return [Guessed(own, torch.stack(q) if q else None) for own, q in zip(guesses, rows)]

    def _level(
        self,
        going: Sequence[int],
        texts: Sequence[Request],
        guesses: Sequence[list[int]],
        rows: Sequence[list[Tensor]],
    ) -> None:
        """One more guess for each of those that are going on, and what it was drawn from."""
        contexts = [Context(texts[i], tuple(guesses[i])) for i in going]
        if not guesses[going[0]]:
            requests = [texts[i] for i in going]
            logits = self.companion.advance(requests, [request.tokens for request in requests])
            dist = self.sample(logits, contexts)
        else:
            x = self.companion.grow([NewNodes(texts[i], guesses[i][-1:], [len(guesses[i]) - 2]) for i in going])
            dist = distribution(self.sample, self.companion.model, x, contexts)
        for row, (i, token) in enumerate(zip(going, draw(dist, contexts))):
            guesses[i].append(token)
            if self.tells and not dist.greedy(row):
                rows[i].append(dist.row(row).clone())

    def forget(self, key: int) -> None:
        """The request has left, or starts again: its rows go."""
        text = self.texts.pop(key, None)
        if text is not None:
            text.release()

    def _text(self, order: Order) -> Request:
        """The request as the order says it is, with room for what is asked."""
        text = self.texts.get(order.key)
        if text is None:
            text = self.texts[order.key] = request_of(order.about | {"tokens": []})
        kept = common(text.tokens, order.tokens)
        if kept < text.known:
            text.tokens = order.tokens[:kept]
            self.companion.lag(text)  # what has grown below other tokens goes
            for name in text.state.keys() - {NAME}:
                del text.state[name]  # what sampling rules have counted
        text.tokens = list(order.tokens)
        if not self.companion.reserve(text, text.known + order.guesses):
            raise MemoryError(f"no room for {text.known} tokens of a draft model's KV")
        return text
