"""One HTTP request and its answer: who asks, what is reserved for it and what it uses, until all of it has ended."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from phasewise.serve.failures import ApiError
from phasewise.serve.quota import Quota

if TYPE_CHECKING:
    from phasewise.serve.answer import Order
    from phasewise.serve.loop import Feed


@dataclass(slots=True, eq=False)
class Exchange:
    """`on_end` is called once, when the answer is sent (or cannot be) and the engine has none of its sequences."""

    on_end: Callable[[Exchange], Any]
    quota: Quota | None = None  # of the key it came with, where there are keys
    model: str | None = None
    reserved: int = 0  # tokens
    prompt_tokens: int = 0  # each prompt once, however many samples it has
    output_tokens: int = 0
    live: int = 0  # sequences that the engine has
    answered: bool = False

    def permit(self, model: str) -> None:
        """Raises ApiError 403 if its key may not use this model."""
        if not self.may(model):
            assert self.quota is not None
            names = ", ".join(self.quota.key.models or ()) or "none"
            raise ApiError(403, f"the key {self.quota.key.name!r} may not use {model!r}; its models: {names}", "model",
                           "model_not_allowed")  # fmt: skip
        self.model = model

    def may(self, model: str) -> bool:
        """Whether its key may use this model."""
        return self.quota is None or self.quota.key.models is None or model in self.quota.key.models

    def within(self, order: Order, asked: int | None) -> Order:
        """The order, with its tokens reserved; an answer whose length was not `asked` for gets what the key allows.
        Raises ApiError for more than that."""
        self.prompt_tokens = sum(map(len, order.prompts))
        if self.quota is None:
            return order
        most = self.quota.key.max_tokens
        if most is not None and asked is not None and asked > most:
            raise ApiError(400, f"the key {self.quota.key.name!r} may ask for {most} tokens per answer, not {asked}",
                           "max_tokens", "max_tokens_exceeded")  # fmt: skip
        if most is not None and order.params.max_tokens > most:
            order = replace(order, params=replace(order.params, max_tokens=most))
        longest = asked or most or 0  # what may be as long as it gets is paid when it has ended
        tokens = self.prompt_tokens + len(order.prompts) * order.n * longest
        self.quota.reserve(tokens)
        self.reserved = tokens
        return order

    # ---- told by the engine's loop, for each sequence
    def hold(self) -> None:
        """It is handed to the engine."""
        self.live += 1

    def refused(self) -> None:
        """The engine has not taken it, nor any other of this request."""
        self.live -= 1
        self.prompt_tokens = 0
        self._end()

    def left(self, feed: Feed) -> None:
        """It has left the engine."""
        assert feed.trace is not None
        self.live -= 1
        self.output_tokens += sum(feed.trace.counts)
        self._end()

    # ---- told by the gate
    def close(self) -> None:
        """The answer is sent, or never will be."""
        self.answered = True
        self._end()

    def _end(self) -> None:
        if self.answered and not self.live:
            self.on_end(self)


CURRENT: ContextVar[Exchange | None] = ContextVar("exchange", default=None)  # the one that the running task answers
