"""Open-loop load over HTTP: requests are sent when they are due, whether or not earlier ones have been answered."""

from __future__ import annotations

import asyncio
import json
import time
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import uvloop

from phasewise.bench.latency import ServedRequest
from phasewise.bench.recording import Ear, counted, stamps
from phasewise.bench.stream import post
from phasewise.bench.workloads import Shot
from phasewise.errors import UserError
from phasewise.request.trace import Trace

Progress = Callable[[int], object]


class LoadClient:
    """A client of one server. Latencies count from when a request was due: a late client hides no slow server."""

    def __init__(self, url: str, model: str, clock: Callable[[], float] = time.perf_counter) -> None:
        self.url, self.model, self.clock = url, model, clock
        self.late = 0.0  # the most seconds that sending lagged behind the plan

    async def run(self, shots: Sequence[Shot], progress: Progress = lambda done: None) -> list[ServedRequest]:
        """Send every request at its time; one result per request, in order, failures included."""
        start, done = self.clock(), 0

        async def one(shot: Shot) -> ServedRequest:
            nonlocal done
            served = await self._one(shot, start + shot.arrival)
            done += 1
            progress(done)
            return served

        return list(await asyncio.gather(*(one(shot) for shot in shots)))

    async def _one(self, shot: Shot, due: float) -> ServedRequest:
        await asyncio.sleep(max(0.0, due - self.clock()))
        self.late = max(self.late, self.clock() - due)
        trace, error = Trace(due), None
        try:
            await self._stream(shot, trace)
        except (OSError, UserError, ValueError, KeyError, IndexError, TypeError) as problem:
            error = f"{type(problem).__name__}: {problem}"
        trace.left = self.clock()
        if error is None and sum(trace.counts) < shot.new:
            error = f"asked for {shot.new} tokens, got {sum(trace.counts)}"
        return ServedRequest(trace, len(shot.prompt), error)

    async def _stream(self, shot: Shot, trace: Trace) -> None:
        """One streamed completion."""
        body = {
            "model": self.model, "prompt": shot.prompt, "max_tokens": shot.new, "temperature": 0, "ignore_eos": True,
            "stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }  # fmt: skip
        events = _Events(trace, self.clock)
        await post(f"{self.url}/v1/completions", body, events.line)
        if trace.counts:
            trace.counts[-1] += events.count - sum(trace.counts)


class _Events:
    """Stamps the events of a stream. `tokens`: those that the server has counted.

    Where the server tells usage as it goes, every step counts, with text or without; else each piece of text does.
    """

    def __init__(self, trace: Trace, clock: Callable[[], float]) -> None:
        self.tokens = 0
        self._trace, self._clock = trace, clock

    @property
    def count(self) -> int:
        return self.tokens or len(self._trace.tokens)

    def line(self, line: bytes) -> None:
        if not line.startswith(b"data:") or line == b"data: [DONE]":
            return
        event = json.loads(line[5:])
        if "error" in event:
            raise UserError(str(event["error"].get("message", event["error"])))
        choice = event["choices"][0] if event.get("choices") else {}
        told = int(event["usage"]["completion_tokens"]) if event.get("usage") else None
        if choice and told is not None:
            if told > self.tokens:
                self._trace.emitted(self._clock(), told - self.tokens)
        elif choice.get("text") or (choice.get("finish_reason") and not self._trace.tokens):
            self._trace.emitted(self._clock(), 1)
        self.tokens = self.tokens if told is None else told


def served_model(url: str) -> str:
    """The first model a server lists. Raises UserError when there is no OpenAI-compatible server."""
    try:
        with urllib.request.urlopen(f"{url}/v1/models", timeout=60) as answer:
            return str(json.load(answer)["data"][0]["id"])
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        raise UserError(f"no OpenAI-compatible server answers at {url}: {error}") from error


@dataclass(frozen=True)
class LoadResult:
    """The outcome of a load: wall-clock seconds, and by how many seconds the client itself was late at worst."""

    model: str
    served: list[ServedRequest]
    seconds: float
    late: float


@dataclass(frozen=True)
class RecordedLoad:
    """A load with all that is known of it: rows for a file, and why the server's events are missing, if they are."""

    result: LoadResult
    rows: list[dict[str, Any]]
    counters: dict[str, float]
    why: str | None


def measure(url: str, shots: Sequence[Shot], progress: Progress) -> LoadResult:
    """Run a load against a server. Raises UserError if none answers."""
    return uvloop.run(_measured(LoadClient(url, served_model(url)), shots, progress))


def record(url: str, shots: Sequence[Shot], progress: Progress) -> RecordedLoad:
    """The same, on record."""
    load = LoadClient(url, served_model(url))

    async def run() -> tuple[LoadResult, Ear]:
        async with Ear(url) as ear:
            return await _measured(load, shots, progress), ear

    before = counted(url)
    result, ear = uvloop.run(run())
    counters = {name: value - before.get(name, 0.0) for name, value in counted(url).items()}
    start = min(one.trace.arrived for one in result.served)
    return RecordedLoad(result, [*stamps(result.served, start), *ear.rows], counters, ear.why)


async def _measured(load: LoadClient, shots: Sequence[Shot], progress: Progress) -> LoadResult:
    start = time.perf_counter()
    served = await load.run(shots, progress)
    return LoadResult(load.model, served, time.perf_counter() - start, load.late)
