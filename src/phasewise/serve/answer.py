"""The answer to one HTTP request: its choices, while and after they are generated."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from starlette.types import Receive

from phasewise.llm import LLM
from phasewise.request.params import SLO, Params
from phasewise.request.request import Left, Request
from phasewise.request.text import Text
from phasewise.serve.failures import SHUTDOWN, ApiError
from phasewise.serve.loop import EngineLoop, Feed
from phasewise.serve.tools.deltas import Delta
from phasewise.serve.tools.reader import Manner, Reader


@dataclass(slots=True, eq=False)
class Choice:
    """One sample of one prompt. `lead` is text that goes before the output (an echoed prompt)."""

    index: int
    feed: Feed
    text: Text
    lead: str = ""
    reader: Reader | None = None  # where there may be more than content
    tokens: int = 0  # taken from the feed so far

    def take(self, first: bool) -> Piece:
        """What has arrived since the last call; after the end, all that is left of it. Raises ApiError if the choice
        failed or was cancelled."""
        text = self._text()
        if self.reader is None:
            return Piece(self.index, text, first, self.finish)
        deltas = self.reader.push(text)
        finish = "stop" if self.reader.done else self.finish
        if finish:
            deltas += self.reader.finish()
        if finish == "stop" and self.reader.called:
            finish = "tool_calls"
        return Piece(self.index, "".join(delta.text for delta in deltas), first, finish, deltas)

    def _text(self) -> str:
        new, self.feed.tokens = self.feed.tokens, []
        self.tokens += len(new)
        lead, self.lead = self.lead, ""
        return lead + self.text.push(new) + (self.text.flush() if self.feed.left else "")

    @property
    def finish(self) -> str | None:
        """'stop' or 'length' when finished, else None. Raises ApiError if the choice failed or was cancelled."""
        left = self.feed.left
        return None if left is None else finish_reason(left)


@dataclass(frozen=True, slots=True)
class Piece:
    """What is new of one choice; `finish` is set on its last piece."""

    index: int
    text: str
    first: bool
    finish: str | None
    deltas: list[Delta] | None = None  # the same told apart, where there may be more than content


def finish_reason(left: Left) -> str:
    """'stop' or 'length'; ApiError for the other ways to leave, as far as the client can still be told."""
    if left.how == "failed":
        raise ApiError(500, left.reason, code="request_failed")
    if left.how == "cancelled":
        raise ApiError(503, SHUTDOWN, code="unavailable")
    return left.reason


@dataclass(frozen=True, slots=True)
class Order:
    """What to generate: `n` samples of each prompt (token ids), with `leads` before their texts."""

    prompts: Sequence[Sequence[int]]
    params: Params
    n: int = 1
    stop: Sequence[str] = ()
    leads: Sequence[str] = ()
    stream: bool = False
    slo: SLO | None = None
    recipe: str = ""
    manner: Manner | None = None  # how outputs are read; None: they are text
    shown: frozenset[int] = frozenset()  # special tokens that have text


class Answer:
    """All choices of one HTTP request. `start` it, then read `whole` or `pieces` inside `attended`."""

    def __init__(self, llm: LLM, engine: EngineLoop, order: Order) -> None:
        self._engine = engine
        self._news = asyncio.Event()
        self.gone = False  # the client went away: nobody reads any more
        self.prompt_tokens = sum(map(len, order.prompts))
        self.choices = [
            Choice(
                at * order.n + i,
                Feed(request, self._news, partial=order.stream),
                llm.text(order.params, order.stop, order.shown),
                order.leads[at] if order.leads else "",
                None if order.manner is None else Reader(order.manner),
            )
            for at, prompt in enumerate(order.prompts)
            for i, request in enumerate(_samples(llm, prompt, order))
        ]

    @property
    def output_tokens(self) -> int:
        return sum(choice.tokens for choice in self.choices)

    async def start(self) -> None:
        """Hand all requests to the engine. Raises what `EngineLoop.add` raises."""
        await self._engine.add([choice.feed for choice in self.choices])

    def abandon(self) -> None:
        """Nobody reads any more: what still runs is cancelled, and its memory goes back."""
        running = [choice.feed for choice in self.choices if choice.feed.left is None]
        if running and not self.gone:
            self._engine.cancel(running)
        self.gone = True
        self._news.set()

    @asynccontextmanager
    async def attended(self, receive: Receive) -> AsyncIterator[None]:
        """While inside, a disconnect of the client abandons the answer; so does leaving early."""
        watcher = asyncio.create_task(self._watch(receive))
        try:
            yield
        finally:
            watcher.cancel()
            self.abandon()

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.abandon()

    async def whole(self) -> list[Piece]:
        """Every choice's whole text, in order; incomplete if `gone`. Raises ApiError if one failed."""
        while not self.gone and any(choice.feed.left is None for choice in self.choices):
            await self._news.wait()
            self._news.clear()
        return [choice.take(first=True) for choice in self.choices]

    async def pieces(self) -> AsyncIterator[list[Piece]]:
        """What arrived with each step, until all choices have left or the client is gone."""
        live, begun = list(self.choices), set[int]()
        while live and not self.gone:
            await self._news.wait()
            self._news.clear()
            found = []
            for choice in [c for c in live if c.feed.tokens or c.feed.left]:
                piece = choice.take(first=choice.index not in begun)
                if piece.finish:
                    live.remove(choice)
                    if choice.feed.left is None:  # its answer is complete whatever would follow
                        self._engine.cancel([choice.feed])
                found.append(piece)
                begun.add(choice.index)
            yield found


def _samples(llm: LLM, prompt: Sequence[int], order: Order) -> list[Request]:
    """The request for a prompt's first sample, and siblings that share its prefill."""
    first = llm.request(prompt, order.params, order.stop, order.slo, order.recipe, order.shown)
    others = [first.sibling(i) for i in range(1, order.n)]
    for other in others:
        other.watch = llm.text(order.params, order.stop, order.shown).watch if order.stop else None
    return [first, *others]
