"""The answer to one HTTP request: its choices, while and after they are generated."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

from starlette.types import Receive

from phasewise.llm import LLM
from phasewise.request.params import SLO, Params
from phasewise.request.request import Departure, Request
from phasewise.request.text import Text
from phasewise.serve.completions.logprobs import LogprobFormatter, TokenScore, by_id
from phasewise.serve.completions.provenance import Origins
from phasewise.serve.failures import SHUTDOWN, ApiError
from phasewise.serve.loop import EngineLoop, OutputStream
from phasewise.serve.notifier import Notifier
from phasewise.serve.tools.deltas import OutputDelta
from phasewise.serve.tools.reader import OutputParser, ParserOptions


@dataclass(slots=True, eq=False)
class AnswerChoice:
    """One sample of one prompt. `lead` is text that goes before the output (an echoed prompt, whose tokens are then
    `told` of as well)."""

    index: int
    feed: OutputStream
    text: Text
    prompt: Sequence[int]
    lead: str | None = None
    teller: LogprobFormatter | None = None
    reader: OutputParser | None = None  # where there may be more than content
    origins: Origins | None = None  # where it is asked how tokens came about
    tokens: int = 0  # taken from the feed so far
    begun: bool = False  # something has been taken
    late: ApiError | None = None  # what is said of it if it is cancelled because its time is over

    def take(self) -> AnswerDelta:
        """Takes what has arrived since the last call; after the end, all that is left of it. Raises ApiError if the
        choice failed or was cancelled."""
        first, self.begun = not self.begun, True
        text, told, origins = self._arrived()
        if self.reader is None:
            return AnswerDelta(self.index, text, first, self.finish, told, origins=origins)
        deltas = self.reader.push(text)
        finish = "stop" if self.reader.done else self.finish
        if finish:
            deltas += self.reader.finish()
        if finish == "stop" and self.reader.called:
            finish = "tool_calls"
        return AnswerDelta(self.index, "".join(delta.text for delta in deltas), first, finish, told, deltas, origins)

    def _arrived(self) -> tuple[str, list[TokenScore] | None, list[dict[str, Any]] | None]:
        """The text since the last call, what is told of its tokens, and how they came about."""
        new, self.feed.tokens = self.feed.tokens, []
        start = len(self.prompt) + self.tokens
        self.tokens += len(new)
        lead, self.lead = self.lead, None
        text = (lead or "") + self.text.push(new) + (self.text.flush() if self.feed.left else "")
        scores, over, origins = self.feed.scores, self.feed.left is not None, None
        if self.origins is not None:
            origins = self.origins.tell(new, [scores.get(start + i) for i in range(len(new))], over)
        if self.teller is None:
            return text, None, origins
        if lead is not None and self.reader is None:  # an echoed prompt
            new, start = [*self.prompt, *new], 0
        return text, self.teller.tell(new, [scores.get(at) for at in range(start, start + len(new))]), origins

    @property
    def likelihood(self) -> float:
        """The mean log-probability of its tokens."""
        start, scores = len(self.prompt), self.feed.scores
        return sum(scores[at].logprob for at in range(start, start + self.tokens)) / max(1, self.tokens)

    @property
    def finish(self) -> str | None:
        """'stop' or 'length' when finished, else None. Raises ApiError if the choice failed or was cancelled."""
        left = self.feed.left
        if self.late is not None and left is not None and left.how == "cancelled":
            raise self.late
        return None if left is None else finish_reason(left)


@dataclass(frozen=True, slots=True)
class AnswerDelta:
    """New text of one choice. `finish` is set on its last piece."""

    index: int
    text: str
    first: bool
    finish: str | None
    told: list[TokenScore] | None = None  # of its tokens, where log-probabilities are wanted
    deltas: list[OutputDelta] | None = None  # the same told apart, where there may be more than content
    origins: list[dict[str, Any]] | None = None  # how its tokens came about, where that is asked


def finish_reason(left: Departure) -> str:
    """'stop' or 'length'; ApiError for the other ways to leave, as far as the client can still be told."""
    if left.how == "failed":
        if left.asked:
            raise ApiError(400, left.reason, code="unanswerable_request")
        raise ApiError(500, left.reason, code="request_failed")
    if left.how == "cancelled":
        raise ApiError(503, SHUTDOWN, code="unavailable")
    return left.reason


@dataclass(frozen=True, slots=True)
class LogprobOptions:
    """The tokens whose log-probabilities are told, and how many of the likeliest come with each. None: no token's."""

    tokens: int | None = None  # the output's, and those of an echoed prompt
    prompt: int | None = None  # the prompt's, by id


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A request for `n` samples of each prompt (token ids), with `leads` before their texts."""

    prompts: Sequence[Sequence[int]]
    params: Params
    n: int = 1
    stop: Sequence[str] = ()
    leads: Sequence[str] = ()
    told: LogprobOptions = LogprobOptions()
    stream: bool = False
    slo: SLO | None = None
    recipe: str = ""
    best: int | None = None  # so many of the samples of a prompt are told: the likeliest
    timeout: float | None = None  # seconds from now
    manner: ParserOptions | None = None  # how outputs are read; None: they are text
    shown: frozenset[int] = frozenset()  # special tokens that have text
    begins: bool = False  # outputs begin a text, and do not go on with the prompt's

    @property
    def echoes(self) -> bool:
        """True if the prompts' tokens are told of, too."""
        return bool(self.leads) and self.manner is None


class Answer:
    """All choices of one HTTP request. `start` it, then read `whole` or `pieces` inside `attended`."""

    def __init__(self, llm: LLM, engine: EngineLoop, order: GenerationRequest) -> None:
        self._engine = engine
        self.bell = Notifier()
        self.gone = False  # the client went away: nobody reads any more
        self._ends = None if order.timeout is None else time.monotonic() + order.timeout
        self._timeout = order.timeout
        self.prompt_tokens = sum(map(len, order.prompts))
        self._tokenizer, self._prompt_told = llm.tokenizer, order.told.prompt
        self._samples, self._best = order.n, order.best
        self.choices = [
            AnswerChoice(
                at * order.n + i,
                OutputStream(request, self.bell, partial=order.stream),
                llm.text(order.params, order.stop, order.shown, before),
                prompt,
                order.leads[at] if order.leads else None,
                None
                if order.told.tokens is None
                else LogprobFormatter(llm.tokenizer, order.told.tokens, () if order.echoes else before),
                None if order.manner is None else OutputParser(order.manner),
                Origins(llm.tokenizer, before) if order.params.provenance else None,
            )
            for at, prompt in enumerate(order.prompts)
            for before in (() if order.begins else prompt,)
            for i, request in enumerate(_samples(llm, prompt, order))
        ]
        self._every = self.choices
        self._goes_on = "after" in (order.params.ask or {})
        self._tiered = llm.limits.tiered
        self._added = llm.adds[order.recipe]
        self._live = list(self.choices)  # those of which there will be more

    @property
    def output_tokens(self) -> int:
        return sum(choice.tokens for choice in self._every)

    @property
    def cached_tokens(self) -> int:
        """Tokens of its prompts that came from the prefix cache and the tiers below it. Siblings share their prompt."""
        return sum(choice.feed.request.cached for choice in self._every[:: self._samples])

    @property
    def details(self) -> dict[str, int]:
        """Usage of its prompts besides their tokens: tokens that came from the KV of an earlier answer, where one was
        named, and from the prefix cache and below, where KV has tiers; rows that were added and stand for no token."""
        found, firsts = {}, [choice.feed.request for choice in self._every[:: self._samples]]
        if self._goes_on or self._tiered:
            found["cached_tokens"] = sum(request.recalled + request.cached * self._tiered for request in firsts)
        if self._added:
            found["added_rows"] = self._added * len(firsts)
        return found

    def prompt_logprobs(self, choice: AnswerChoice) -> list[dict[str, Any] | None] | None:
        """Log-probabilities of the prompt's tokens. The first has none; None where nobody asked for them."""
        top = self._prompt_told
        if top is None:
            return None
        scores = [choice.feed.scores.get(at) for at in range(len(choice.prompt))]
        return [
            None if score is None else by_id(self._tokenizer, token, score, top)
            for token, score in zip(choice.prompt, scores)
        ]

    async def start(self) -> None:
        """Hand all requests to the engine. Raises what `EngineLoop.add` raises."""
        await self._engine.add([choice.feed for choice in self.choices])

    def abandon(self) -> None:
        """Nobody reads any more: what still runs is cancelled, and its memory goes back."""
        running = [choice.feed for choice in self.choices if choice.feed.left is None]
        if running and not self.gone:
            self._engine.cancel(running)
        self.gone = True
        self.bell.ring()

    def expire(self) -> None:
        """Its time is over: what still runs is cancelled, and its choices say why."""
        running = [choice for choice in self.choices if choice.feed.left is None]
        for choice in running:
            choice.late = ApiError(
                408, f"the answer was not complete within its timeout of {self._timeout:g} s: allow more, or ask for "
                "fewer tokens", "timeout", "deadline_exceeded",
            )  # fmt: skip
        self._engine.cancel([choice.feed for choice in running])

    @asynccontextmanager
    async def attended(self, receive: Receive) -> AsyncIterator[None]:
        """While inside, a disconnect of the client abandons the answer; so does leaving early. Its time may end."""
        watcher, timer = asyncio.create_task(self._watch(receive)), None
        if self._ends is not None:
            timer = asyncio.get_running_loop().call_later(max(0.0, self._ends - time.monotonic()), self.expire)
        try:
            yield
        finally:
            if timer is not None:
                timer.cancel()
            watcher.cancel()
            self.abandon()

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.abandon()

    async def whole(self) -> list[AnswerDelta]:
        """Every choice's whole text, in order; incomplete if `gone`. Raises ApiError if one failed."""
        while not self.gone and any(choice.feed.left is None for choice in self.choices):
            await self.bell.wait()
        pieces = [choice.take() for choice in self.choices]
        return pieces if self._best is None or self.gone else self._chosen(pieces, self._best)

    def _chosen(self, pieces: Sequence[AnswerDelta], best: int) -> list[AnswerDelta]:
        """The likeliest samples of each prompt, which become the answer's choices."""
        ranked = []
        for start in range(0, len(pieces), self._samples):
            samples = range(start, start + self._samples)
            ranked += sorted(samples, key=lambda i: -self.choices[i].likelihood)[:best]
        self.choices = [replace(self.choices[i], index=index) for index, i in enumerate(ranked)]
        return [replace(pieces[i], index=index) for index, i in enumerate(ranked)]

    @property
    def over(self) -> bool:
        """True if nothing is left to take: all choices have been taken to their end, or the client is gone."""
        return self.gone or not self._live

    def take(self) -> list[AnswerDelta]:
        """Takes what has arrived since the last call. Raises ApiError if a choice failed."""
        found = []
        for choice in [c for c in self._live if c.feed.tokens or c.feed.left]:
            piece = choice.take()
            if piece.finish:
                self._live.remove(choice)
                if choice.feed.left is None:  # its answer is complete whatever would follow
                    self._engine.cancel([choice.feed])
            found.append(piece)
        return found


def _samples(llm: LLM, prompt: Sequence[int], order: GenerationRequest) -> list[Request]:
    """The request for a prompt's first sample, and siblings that share its prefill."""
    first = llm.request(prompt, order.params, order.stop, order.slo, order.recipe, order.shown, order.begins)
    others = [first.sibling(i) for i in range(1, order.n)]
    for other in others:
        before = () if order.begins else prompt
        other.watch = llm.text(order.params, order.stop, order.shown, before).watch if order.stop else None
    return [first, *others]
