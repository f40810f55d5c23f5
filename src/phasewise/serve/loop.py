"""The engine's thread does nothing but steps; everybody else talks to it through a queue of commands.

    event loop:     add / cancel / snapshot -> command queue                    Feed.tokens, Feed.left, Feed.bell
    engine thread:  obey commands -> step -> what is new of every feed -> call_soon_threadsafe, once per step

With nothing to run the thread sleeps in the queue, and looks after workers where there are any. If stepping itself
breaks, every live request fails with the reason and nothing new is accepted; a single request that fails is the
engine's own business.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from queue import Empty, SimpleQueue
from typing import Any, TypeVar, cast

import torch

from phasewise.errors import UserError
from phasewise.ops.native import release_threads
from phasewise.request.params import BACKGROUND
from phasewise.request.request import Departure, Request
from phasewise.request.score import Score
from phasewise.request.trace import Trace
from phasewise.serve.failures import ServerBusy, Unavailable
from phasewise.serve.guard.context import CURRENT, RequestContext
from phasewise.serve.notifier import Notifier
from phasewise.serve.watch.watcher import Told, Watcher
from phasewise.verbs.place import Placed

T = TypeVar("T")
log = logging.getLogger(__name__)
JOIN_SECONDS = 5.0  # how long `stop` waits for a step under way
WATCH = 0.5  # seconds between steps with nothing to run, where workers may have news, or have died


@dataclass(slots=True, eq=False)
class OutputStream:
    """The output of one request, on the event loop's side. After `EngineLoop.add` the request itself is the engine's.

    `tokens` have arrived and wait to be taken; a feed that is not `partial` gets them all at the end. `bell` is rung
    whenever something arrived, and may be shared by several feeds.
    """

    request: Request
    bell: Notifier
    partial: bool = False
    arrived: float = field(default_factory=time.monotonic)
    tokens: list[int] = field(default_factory=list)
    scores: dict[int, Score] = field(default_factory=dict)  # by position, of tokens that have arrived
    left: Departure | None = None
    trace: Trace | None = None  # from when it has left
    exchange: RequestContext | None = field(default_factory=CURRENT.get)  # which it is part of
    posted: int = field(init=False)  # the engine thread's: how many of the request's tokens are on their way ...
    scored: int = 0  # ... and up to which position their scores
    number: int = 0  # under which the event stream speaks of it

    def __post_init__(self) -> None:
        self.posted = self.request.known


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The engine between two steps. Bytes are of KV."""

    waiting: int = 0
    running: int = 0
    kv_bytes: int = 0
    prefix_bytes: int = 0
    counters: dict[str, int] = field(default_factory=dict)
    workers: dict[str, int] = field(default_factory=dict)  # alive, by role
    by_role: dict[str, dict[str, int]] = field(default_factory=dict)  # counters, where there are workers
    by_recipe: dict[str, dict[str, int]] = field(default_factory=dict)  # those that belong to single requests
    tiers: Mapping[str, float] = field(default_factory=dict)  # of KV below the budget: see `Placed`
    lora_bytes: int = 0  # of adapters, in all engines together


News = tuple[OutputStream, list[int], dict[int, Score], Departure | None, Trace | None]


class EngineLoop:
    """Owns an engine in a thread of its own. Public methods are for the event loop that called `start`.

    At most `capacity` requests are live at a time. `on_left` is told, on the event loop, of each that has left.
    """

    def __init__(
        self, placed: Placed, capacity: int, on_left: Callable[[OutputStream], Any] = lambda feed: None
    ) -> None:
        self.capacity = capacity
        self.live = 0
        self.failed: str | None = None  # why the engine can no longer step
        self.stopping = False
        self._placed, self._on_left = placed, on_left
        self._commands: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._feeds: dict[str, OutputStream] = {}  # of live requests; the engine thread's
        self._last = Snapshot()
        self._watcher: Watcher | None = None  # the engine thread's; nobody listens without
        self._numbers = itertools.count(1)
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    # ---- the event loop's side
    def start(self) -> None:
        self._events = asyncio.get_running_loop()
        release_threads()  # those of loading: the engine's thread has its own
        self._thread.start()

    async def add(self, feeds: Sequence[OutputStream]) -> None:
        """Hand requests over, all or none: returns when the engine has accepted them.

        Raises UserError if one can never run, ServerBusy or Unavailable if the server cannot take them now.
        """
        if self.failed is not None:
            raise Unavailable(f"the engine has failed ({self.failed}); restart the server")
        if self.stopping:
            raise Unavailable("the server is shutting down")
        if len(feeds) > self.capacity:
            raise UserError(f"{len(feeds)} sequences at once are more than this server takes ({self.capacity})")
        if self.live + len(feeds) > self.capacity:
            raise ServerBusy(f"{self.live} requests are live and the limit is {self.capacity}: try again later")
        self.live += len(feeds)
        for feed in feeds:
            feed.number = next(self._numbers)
            if feed.exchange is not None:
                feed.exchange.hold(feed.number)
                if feed.exchange.background:
                    feed.request.params = replace(feed.request.params, priority=BACKGROUND)
        answer: asyncio.Future[Exception | None] = self._events.create_future()
        self._commands.put(lambda: self._add(feeds, answer))
        try:
            error = await answer
        except asyncio.CancelledError:
            self.cancel(feeds)
            raise
        if error is not None:
            raise error

    async def between(self, work: Callable[[], T]) -> T:
        """Have the engine's thread do this between two steps: what it gives, or raises."""
        answer: asyncio.Future[T] = self._events.create_future()

        def do() -> None:
            try:
                self.tell(_resolve, answer, work())
            except Exception as error:
                self.tell(_reject, answer, error)

        self._commands.put(do)
        return await answer

    def drive(self, placed: Placed | None) -> None:
        """Another engine from now on, with nothing under way; None: there will be one before the next step. Only from
        within `between`."""
        self._placed = cast(Placed, placed)

    def watch(self, watcher: Watcher) -> list[Told]:
        """Have it look at what every step does: what it begins with. Only from within `between`."""
        self._watcher = watcher
        return watcher.begin(self._placed, self._feeds.values())

    def unwatch(self) -> None:
        """Nobody listens any more."""

        def do() -> None:
            self._watcher = None

        self._commands.put(do)

    def cancel(self, feeds: Sequence[OutputStream]) -> None:
        """Drop those that have not left yet."""
        self._commands.put(lambda: self._cancel(feeds))

    def cancel_all(self) -> None:
        """Drop everything, at the end of a shutdown's patience."""
        self._commands.put(lambda: self._cancel(list(self._feeds.values())))

    async def snapshot(self, patience: float = 1.0) -> Snapshot:
        """The engine after the step under way, or an older one if that takes longer than `patience` seconds."""
        answer: asyncio.Future[Snapshot] = self._events.create_future()
        self._commands.put(lambda: self._snapshot(answer))
        try:
            self._last = await asyncio.wait_for(answer, patience)
        except TimeoutError:
            log.info("the engine's step takes longer than %.1f s", patience)
        return self._last

    def stop(self) -> None:
        """End the thread after the step under way; what still runs is dropped."""
        self._commands.put(None)
        self._thread.join(JOIN_SECONDS)

    # ---- the engine's thread
    @torch.inference_mode()  # once, instead of in every step
    def _run(self) -> None:
        while True:
            try:
                if not self._obey():
                    return
                if self.failed is None and (not self._placed.idle or self._placed.workers):
                    self._post(self._placed.step())
            except Exception as error:
                self._break(error)

    def _obey(self) -> bool:
        """Run the commands that wait; with nothing else to do, wait for one, but look after workers now and then. False
        when told to end."""
        wait = self.failed is not None or self._placed.idle
        patience = WATCH if self.failed is None and self._placed.workers else None
        while wait or not self._commands.empty():
            try:
                command = self._commands.get(timeout=patience)
            except Empty:
                return True
            if command is None:
                return False
            command()
            wait = False
        return True

    def _add(self, feeds: Sequence[OutputStream], answer: asyncio.Future[Exception | None]) -> None:
        refusal: Exception | None = None
        if self.failed is not None:
            refusal = Unavailable(f"the engine has failed ({self.failed}); restart the server")
        else:
            try:
                for feed in feeds:
                    self._placed.add(feed.request)
                    self._feeds[feed.request.id] = feed
            except Exception as error:
                refusal = error
                if not isinstance(error, UserError):
                    log.exception("the engine could not take a request")
                for feed in feeds:
                    if self._feeds.pop(feed.request.id, None) is not None:
                        self._placed.cancel(feed.request)
        self.tell(self._added, answer, refusal, feeds)
        self._look()

    def _cancel(self, feeds: Sequence[OutputStream]) -> None:
        if self.failed is not None:
            return
        alive = [feed.request for feed in feeds if feed.request.id in self._feeds]
        for request in alive:
            self._placed.cancel(request)
        self._post([request for request in alive if request.left is not None])

    def _snapshot(self, answer: asyncio.Future[Snapshot]) -> None:
        if self.failed is not None:
            self.tell(_resolve, answer, Snapshot())
            return
        placed = self._placed
        held = placed.kv_bytes, placed.prefix_bytes
        now = Snapshot(
            len(placed.waiting), len(placed.running), *held, placed.counters.as_dict(), placed.workers,
            placed.by_role, placed.by_recipe, placed.tiers, placed.lora_bytes,
        )  # fmt: skip
        self.tell(_resolve, answer, now)

    def _post(self, progressed: Sequence[Request]) -> None:
        """Send what is new of these requests to their feeds, in one go."""
        self._look()
        news: list[News] = []
        for request in progressed:
            feed = self._feeds.get(request.id)
            if feed is None or not (feed.partial or request.left):
                continue
            tokens, feed.posted = request.tokens[feed.posted :], request.known
            if request.left is not None:
                del self._feeds[request.id]
            news.append((feed, tokens, _scores(feed), request.left, request.trace if request.left else None))
        if news:
            self.tell(self._deliver, news)

    def _look(self) -> None:
        if self._watcher is not None:
            self._watcher.look(self._placed, self._feeds.values())

    def _break(self, error: Exception) -> None:
        """Stepping itself is broken: nobody can be served any more."""
        log.exception("the engine has failed; every live request fails with it")
        self.failed = f"{type(error).__name__}: {error}"
        left = Departure("failed", f"the engine has failed ({self.failed})")
        feeds, self._feeds = list(self._feeds.values()), {}
        self._look()
        self.tell(self._deliver, [(feed, [], {}, left, feed.request.trace) for feed in feeds])

    def tell(self, function: Callable[..., Any], *args: Any) -> None:
        """From the engine's thread: have the event loop call this."""
        try:
            self._events.call_soon_threadsafe(function, *args)
        except RuntimeError:
            log.debug("the event loop is closed: nobody is left to tell")

    # ---- on the event loop again
    def _added(
        self, answer: asyncio.Future[Exception | None], refusal: Exception | None, feeds: Sequence[OutputStream]
    ) -> None:
        if refusal is not None:
            self.live -= len(feeds)
            for exchange in _exchanges(feeds):
                exchange.refused()
        _resolve(answer, refusal)

    def _deliver(self, news: Sequence[News]) -> None:
        bells: dict[Notifier, None] = {}
        for feed, tokens, scores, left, trace in news:
            feed.tokens += tokens
            feed.scores |= scores
            if left is not None:
                self.live -= 1
                feed.left, feed.trace = left, trace
                self._on_left(feed)
                for exchange in _exchanges([feed]):
                    exchange.left(feed)
            bells[feed.bell] = None
        for bell in bells:
            bell.ring()


def _exchanges(feeds: Sequence[OutputStream]) -> list[RequestContext]:
    """The exchange that each request is part of, if there is one."""
    return [feed.exchange for feed in feeds if feed.exchange is not None]


def _scores(feed: OutputStream) -> dict[int, Score]:
    """Those that are not on their way yet."""
    request, start = feed.request, feed.scored
    if not request.params.scored:
        return {}
    feed.scored = request.known
    return {at: request.scores[at] for at in range(start, request.known) if at in request.scores}


def _reject(answer: asyncio.Future[Any], error: Exception) -> None:
    if not answer.done():
        answer.set_exception(error)


def _resolve(answer: asyncio.Future[Any], value: Any) -> None:
    if not answer.done():
        answer.set_result(value)
