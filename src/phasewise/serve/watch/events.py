"""GET /events: what the engine does and what becomes of requests, as server-sent events (docs/events.md).

Nothing is found out, and nothing made, while nobody listens. Whoever reads too slowly loses events, and is told how
many; the engine never waits.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import AsyncIterator, Iterable
from itertools import count

from fastapi import Request
from starlette.responses import Response, StreamingResponse

from phasewise.serve.failures import ApiError
from phasewise.serve.guard.context import CURRENT
from phasewise.serve.guard.keys import KeyRing
from phasewise.serve.loop import EngineLoop
from phasewise.serve.notifier import Notifier
from phasewise.serve.watch.watcher import Told, Watcher

HELD = 1024  # events that wait for one listener
MOST = 64  # listeners
BEAT = 15.0  # seconds after which a silent stream says that it is alive
ENDLESS = "/events"  # the path of the stream, which has no end: HEAD is not answered there


class Listener:
    """One stream: what waits to be sent on it. `own`: only the requests of this key, and no steps; None: all."""

    def __init__(self, own: str | None) -> None:
        self.own, self.bell, self.over = own, Notifier(), False
        self.dropped = 0  # since it was last told
        self._waits: deque[str] = deque()

    def hears(self, kind: str, whose: str | None) -> bool:
        """True if an event is for this listener."""
        return self.own is None or (kind == "request" and whose == self.own)

    def push(self, text: str) -> None:
        if len(self._waits) >= HELD:
            self.dropped += 1
        else:
            self._waits.append(text)
        self.bell.ring()

    def end(self) -> None:
        self.over = True
        self.bell.ring()

    def take(self) -> list[str]:
        """Takes what waits to be sent."""
        found = list(self._waits)
        self._waits.clear()
        if self.dropped:
            found.append(written("dropped", {"count": self.dropped}))
            self.dropped = 0
        return found


class Events:
    """Those who listen. `keys`: whose requests they may hear of, and whether that still holds."""

    def __init__(self, engine: EngineLoop, kv_limit: int, keys: KeyRing | None, open_metrics: bool) -> None:
        self._engine, self._kv_limit, self._keys, self._open = engine, kv_limit, keys, open_metrics
        self._listeners: set[Listener] = set()
        self._watcher: Watcher | None = None
        self._ids = count(1)
        self._closed = False

    async def stream(self, request: Request) -> Response:
        """All events; with a key that may not read /metrics, those of its own requests."""
        if self._closed:
            raise ApiError(503, "the server is shutting down", code="unavailable")
        if len(self._listeners) >= MOST:
            raise ApiError(429, f"{MOST} event streams are open, and there may be no more", code="too_many_listeners")
        quota = exchange.quota if (exchange := CURRENT.get()) is not None else None
        own = None if quota is None or quota.key.metrics or self._open else quota.key.name
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        return StreamingResponse(self._run(Listener(own), request), 200, headers, "text/event-stream; charset=utf-8")

    def close(self) -> None:
        """The server ends: so do all streams."""
        self._closed = True
        for listener in self._listeners:
            listener.end()

    # ---- inside
    async def _run(self, listener: Listener, request: Request) -> AsyncIterator[str]:
        self._listeners.add(listener)
        try:
            if self._closed:
                return
            told = await self._engine.between(self._begin)
            seen = "all" if listener.own is None else "own"
            hello = written("hello", {"version": 1, "scope": seen, "kv_limit_bytes": self._kv_limit})
            yield hello + "".join(written(kind, data) for kind, whose, data in told if listener.hears(kind, whose))
            while not listener.over and self._welcome(request):
                try:
                    async with asyncio.timeout(BEAT):
                        await listener.bell.wait()
                except TimeoutError:
                    yield ": nothing new\n\n"
                if text := "".join(listener.take()):
                    yield text
        finally:
            self._listeners.discard(listener)
            if not self._listeners and self._watcher is not None:
                self._watcher = None
                self._engine.unwatch()

    def _welcome(self, request: Request) -> bool:
        """True if its key, where it needs one, is still known."""
        try:
            if self._keys is not None:
                self._keys.find(request.scope["headers"])
        except ApiError:
            return False
        return True

    def _begin(self) -> list[Told]:
        """In the engine's thread: from now on its events are told."""
        if self._watcher is None:
            self._watcher = Watcher(self._told)
        return self._engine.watch(self._watcher)

    def _told(self, events: list[Told]) -> None:
        """Likewise: what is new goes to the event loop."""
        self._engine.tell(self._spread, events)

    def _spread(self, events: Iterable[Told]) -> None:
        for kind, whose, data in events:
            text = None
            for listener in self._listeners:
                if listener.hears(kind, whose):
                    text = text or written(kind, data, next(self._ids))
                    listener.push(text)


def written(kind: str, data: dict[str, object], number: int | None = None) -> str:
    """One server-sent event."""
    id = "" if number is None else f"id: {number}\n"
    return f"event: {kind}\n{id}data: {json.dumps(data)}\n\n"
