"""One HTTP request and its answer: who asks, what is reserved for it and what it uses, until all of it has ended."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from phasewise.serve.failures import ApiError
from phasewise.serve.guard.policy import UNLIMITED, Caps
from phasewise.serve.guard.quota import Quota

if TYPE_CHECKING:
    from phasewise.serve.completions.answer import GenerationRequest
    from phasewise.serve.loop import OutputStream


@dataclass(slots=True, eq=False)
class RequestContext:
    """`on_end` is called once, when the answer is sent (or cannot be) and the engine has none of its sequences."""

    on_end: Callable[[RequestContext], Any]
    id: str = ""
    method: str = ""
    path: str = ""
    caps: Caps = UNLIMITED  # of the server
    began: float = field(default_factory=time.monotonic)
    quota: Quota | None = None  # of the key it came with, where there are keys
    counted: bool = False  # whether it has entered that quota
    background: bool = False  # a line of a batch: runs only while no others do, outside of its key's rates
    model: str | None = None
    reserved: int = 0  # tokens
    ordered: int = 0  # tokens of its prompts, each once, however many samples it has ...
    prompt_tokens: int = 0  # ... and as far as the engine has taken them
    output_tokens: int = 0
    ttft: float | None = None  # seconds until the first token of any of its sequences
    ways: Counter[str] = field(default_factory=Counter)  # how its sequences have left
    status: int | None = None  # as sent
    error: str | None = None  # the code of an error that the client was told
    parent: Sequence[tuple[bytes, bytes]] = ()  # headers that say which trace of the client's it is part of
    feeds: list[OutputStream] | None = None  # that have left, where traces are made of them
    live: int = 0  # sequences that the engine has
    numbers: list[int] = field(default_factory=list)  # of its sequences, in the event stream
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
        """True if its key may use this model."""
        return self.quota is None or self.quota.key.models is None or model in self.quota.key.models

    def within(self, order: GenerationRequest, asked: int | None, param: str) -> GenerationRequest:
        """The order, with its tokens reserved. What was not asked for, as the length of an answer may not be, is what
        the server and the key allow; ApiError for more than that. `param`: the field its prompts came in."""
        self.ordered = sum(map(len, order.prompts))
        order = _capped(order, self.caps, "this server", (asked, param))
        if self.quota is None:
            return order
        key = self.quota.key
        order = _capped(order, key.caps, f"the key {key.name!r}", (asked, param))
        if key.priority:
            order = replace(order, params=replace(order.params, priority=order.params.priority + key.priority))
        if self.background:
            return order
        bounded = asked or key.caps.max_tokens or self.caps.max_tokens
        known = order.params.max_tokens if bounded else 0  # what has no bound is paid when it has ended
        tokens = self.ordered + len(order.prompts) * order.n * known
        self.quota.reserve(tokens)
        self.reserved = tokens
        return order

    # ---- told by the engine's loop, for each sequence
    def hold(self, number: int) -> None:
        """It is handed to the engine."""
        self.live += 1
        self.numbers.append(number)
        self.prompt_tokens = self.ordered

    def refused(self) -> None:
        """The engine has not taken it, nor any other of this request."""
        self.live -= 1
        self.prompt_tokens = 0
        self._end()

    def left(self, feed: OutputStream) -> None:
        """It has left the engine."""
        assert feed.left is not None and feed.trace is not None
        self.live -= 1
        self.output_tokens += sum(feed.trace.counts)
        if feed.trace.tokens:
            first = feed.trace.tokens[0] - self.began
            self.ttft = first if self.ttft is None else min(first, self.ttft)
        if self.feeds is not None:
            self.feeds.append(feed)
        self.ways[feed.left.reason if feed.left.how == "finished" else feed.left.how] += 1
        self._end()

    # ---- told by the gate
    def close(self) -> None:
        """The answer is sent, or never will be."""
        self.answered = True
        self._end()

    def _end(self) -> None:
        if self.answered and not self.live:
            self.on_end(self)


def _capped(order: GenerationRequest, caps: Caps, whose: str, said: tuple[int | None, str]) -> GenerationRequest:
    """The order as far as `caps` allow; ApiError if it asks for more. `said`: as in `within`."""
    asked, param = said
    longest, answers = max(map(len, order.prompts)), len(order.prompts) * order.n
    for given, most, name, what in (
        (longest, caps.max_prompt, param, "tokens per prompt"),
        (answers, caps.max_n, "n", "answers per request"),
        (asked, caps.max_tokens, "max_tokens", "tokens per answer"),
        (order.timeout, caps.timeout, "timeout", "seconds per request"),
    ):
        if most is not None and given is not None and given > most:
            raise ApiError(400, f"{whose} allows {most} {what}, not {given}", name, "limit_exceeded")
    if caps.max_tokens is not None and order.params.max_tokens > caps.max_tokens:
        order = replace(order, params=replace(order.params, max_tokens=caps.max_tokens))
    return order if caps.timeout is None or order.timeout is not None else replace(order, timeout=caps.timeout)


CURRENT: ContextVar[RequestContext | None] = ContextVar(
    "exchange", default=None
)  # the one that the running task answers


def note(error: ApiError) -> None:
    """The client of the running task is told of an error."""
    if (exchange := CURRENT.get()) is not None:
        exchange.error = error.code or str(error.status)
