"""Collects the events of the stream in the engine's thread between two steps, only while somebody listens.

`Told` are (kind, whose, data): kind "step" is nobody's, "request" belongs to the key its request came with. Times are
seconds of the engine's clock; there is no text in any of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from phasewise.adapters import AGAIN

if TYPE_CHECKING:
    from phasewise.serve.loop import OutputStream
    from phasewise.verbs.place import Placed

Told = tuple[str, "str | None", dict[str, Any]]
LANE = ("steps", "rows", "prompt_rows", "drafted", "accepted", "forced")  # counters of a lane
ENGINE = "engine"  # the lane of a placement without workers


class Watcher:
    """Compares what there is with what it has told. `look` after every step, and whenever requests come or go."""

    def __init__(self, tell: Callable[[list[Told]], None]) -> None:
        self._tell = tell
        self._placed: Placed | None = None
        self._counted: dict[str, dict[str, int]] = {}  # by lane
        self._numbers: tuple[int, ...] = ()  # of the last step event, but for its lanes
        self._lives: dict[
            int, tuple[OutputStream, dict[str, float]]
        ] = {}  # of each request, what was told of it, and when

    def begin(self, placed: Placed | None, feeds: Iterable[OutputStream]) -> list[Told]:
        """The state that a new listener needs: the engine as it is, and the lives of the requests so far."""
        if self._placed is None:
            self._lives = {feed.number: (feed, {}) for feed in feeds}
            for feed, life in self._lives.values():
                life |= {what: at for what, at, _ in _stages(feed)}
        lives = [told for feed, life in self._lives.values() for told in _so_far(feed, life)]
        if placed is None:  # the model sleeps, and there are no requests
            return []
        if self._placed is None:
            self._placed, self._counted, self._numbers = placed, _counted(placed), _numbers(placed)
        return [_step(_numbers(placed), []), *lives]

    def look(self, placed: Placed, feeds: Iterable[OutputStream]) -> None:
        """Tell what is new."""
        found: list[Told] = []
        if placed is not self._placed:  # it has been loaded anew
            self._placed, self._counted = placed, dict.fromkeys(_counted(placed), _NOTHING)
        here = {feed.number: feed for feed in feeds}
        for number in [number for number in self._lives if number not in here]:  # the engine has failed
            feed, _ = self._lives.pop(number)
            how = {"how": "failed", "output_tokens": feed.request.n_out}
            found.append(_event(feed, "left", time.monotonic(), how))
        for number, feed in here.items():
            _, life = self._lives.setdefault(number, (feed, {}))
            found += _news(feed, life, alone=not placed.workers)
            if feed.request.left is not None:
                del self._lives[number]
        numbers, lanes = _numbers(placed), self._lanes(placed)
        if lanes or numbers != self._numbers:
            self._numbers = numbers
            found.append(_step(numbers, lanes))
        if found:
            self._tell(found)

    def _lanes(self, placed: Placed) -> list[dict[str, Any]]:
        """The activity of every worker since the last time, where there is any."""
        lanes, now = [], _counted(placed)
        for name, counts in now.items():
            before = self._counted.get(name, _NOTHING)
            new = {key: counts[key] - before[key] for key in LANE}
            if new["steps"] or new["rows"]:
                prefill = new.pop("prompt_rows")
                lanes.append({"worker": name, "prefill": prefill, "decode": new.pop("rows") - prefill, **new})
        self._counted = now
        return lanes


_NOTHING = dict.fromkeys(LANE, 0)


def _counted(placed: Placed) -> dict[str, dict[str, int]]:
    """The counters of every worker, or of the engine."""
    if not placed.workers:
        counters = placed.counters
        return {ENGINE: {key: getattr(counters, key) for key in LANE}}
    return {name: {key: counts[key] for key in LANE} for name, counts in placed.by_worker.items()}


def _numbers(placed: Placed) -> tuple[int, ...]:
    return len(placed.waiting), len(placed.running), placed.kv_bytes, placed.prefix_bytes


def _step(numbers: tuple[int, ...], lanes: Sequence[dict[str, Any]]) -> Told:
    told = dict(zip(("waiting", "running", "kv_bytes", "prefix_bytes"), numbers))
    return "step", None, {"at": round(time.monotonic(), 4), **told, "lanes": lanes}


def _event(feed: OutputStream, what: str, at: float, more: dict[str, Any] | None = None) -> Told:
    quota = None if feed.exchange is None else feed.exchange.quota
    told = {"number": feed.number, "what": what, "at": round(at, 4)} | (more or {})
    return "request", None if quota is None else quota.key.name, told


def _stages(feed: OutputStream) -> Iterable[tuple[str, float, dict[str, Any]]]:
    """The stages that a request has reached, when, and what is told of them."""
    request, trace = feed.request, feed.request.trace
    recipe = request.recipe.partition(AGAIN)[0]
    yield "queued", feed.arrived, {"prompt_tokens": request.prompt_len, "recipe": recipe}
    if trace.admitted is not None:
        cached = {} if request.kv is None else {"cached_tokens": request.kv.reused}
        yield "admitted", trace.admitted, _by(feed, "admitted") | cached
    if trace.tokens:
        yield "first_token", trace.tokens[0], _by(feed, "first_token")
    if trace.sent is not None:
        yield "sent", trace.sent, _by(feed, "sent")
    if trace.owned is not None:
        yield "owned", trace.owned, _by(feed, "owned")


def _by(feed: OutputStream, what: str) -> dict[str, Any]:
    """The worker that a stage ran on."""
    return {"worker": feed.request.trace.by.get(what, ENGINE)}


def _so_far(feed: OutputStream, life: dict[str, float]) -> Iterable[Told]:
    """A life again, as far as it has been told."""
    for what, at, more in _stages(feed):
        if what in life:
            yield _event(feed, what, at, more)


def _news(feed: OutputStream, life: dict[str, float], alone: bool) -> Iterable[Told]:
    """Events of a request's life since the last look. A stage whose time has changed has come again."""
    request = feed.request
    for what, at, more in _stages(feed):
        if (life.get(what) != at and what != "first_token") or what not in life:
            life[what] = at
            yield _event(feed, what, at, more)
    if alone and request.left is None and "admitted" in life:
        waits = request.kv is None
        if waits != ("preempted" in life):
            now = time.monotonic()
            if waits:
                life["preempted"] = now
            else:
                del life["preempted"]
            yield _event(feed, "preempted" if waits else "resumed", now, {"worker": ENGINE})
    if request.left is not None:
        left = request.left
        reason = {"reason": left.reason} if left.how == "finished" else {}
        at = time.monotonic() if request.trace.left is None else request.trace.left
        told = {"how": left.how, **reason, "output_tokens": request.n_out}
        yield _event(feed, "left", at, _by(feed, "left") | told)
