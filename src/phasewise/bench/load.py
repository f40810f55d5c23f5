"""Open-loop load over HTTP: requests are sent when they are due, whether or not earlier ones have been answered."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import httpx

from phasewise.bench.latency import Served
from phasewise.bench.workloads import Shot
from phasewise.errors import UserError
from phasewise.request.trace import Trace

Progress = Callable[[int], object]


class Load:
    """A client of one server. Latencies count from when a request was due: a late client hides no slow server."""

    def __init__(self, client: httpx.AsyncClient, model: str, clock: Callable[[], float] = time.perf_counter) -> None:
        self.client, self.model, self.clock = client, model, clock
        self.late = 0.0  # the most seconds that sending lagged behind the plan

    async def run(self, shots: Sequence[Shot], progress: Progress = lambda done: None) -> list[Served]:
        """Send every request at its time; one result per request, in order, failures included."""
        start, done = self.clock(), 0

        async def one(shot: Shot) -> Served:
            nonlocal done
            served = await self._one(shot, start + shot.arrival)
            done += 1
            progress(done)
            return served

        return list(await asyncio.gather(*(one(shot) for shot in shots)))

    async def _one(self, shot: Shot, due: float) -> Served:
        await asyncio.sleep(max(0.0, due - self.clock()))
        self.late = max(self.late, self.clock() - due)
        trace, error = Trace(due), None
        try:
            await self._stream(shot, trace)
        except (httpx.HTTPError, UserError, ValueError, KeyError, IndexError) as problem:
            error = f"{type(problem).__name__}: {problem}"
        trace.left = self.clock()
        if error is None and sum(trace.counts) < shot.new:
            error = f"asked for {shot.new} tokens, got {sum(trace.counts)}"
        return Served(trace, len(shot.prompt), error)

    async def _stream(self, shot: Shot, trace: Trace) -> None:
        """One streamed completion."""
        body = {
            "model": self.model, "prompt": shot.prompt, "max_tokens": shot.new, "temperature": 0, "ignore_eos": True,
            "stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }  # fmt: skip
        async with self.client.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != 200:
                await response.aread()
                raise UserError(f"HTTP {response.status_code}: {_message(response)}")
            tokens = await self._events(response, trace)
        if trace.counts:
            trace.counts[-1] += tokens - sum(trace.counts)

    async def _events(self, response: httpx.Response, trace: Trace) -> int:
        """Stamp the events of a stream; the number of tokens the server counted.

        Where the server tells usage as it goes, every step counts, with text or without; else each piece of text does.
        """
        tokens = 0
        async for line in response.aiter_lines():
            if not line.startswith("data:") or line == "data: [DONE]":
                continue
            event = json.loads(line.removeprefix("data:"))
            if "error" in event:
                raise UserError(str(event["error"].get("message", event["error"])))
            choice = event["choices"][0] if event.get("choices") else {}
            told = int(event["usage"]["completion_tokens"]) if event.get("usage") else None
            if choice and told is not None:
                if told > tokens:
                    trace.emitted(self.clock(), told - tokens)
            elif choice.get("text") or (choice.get("finish_reason") and not trace.tokens):
                trace.emitted(self.clock(), 1)
            tokens = tokens if told is None else told
        return tokens or len(trace.tokens)


def _message(response: httpx.Response) -> str:
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return response.text[:200]


async def served_model(client: httpx.AsyncClient) -> str:
    """The first model a server lists. Raises UserError when there is no OpenAI-compatible server."""
    try:
        response = await client.get("/v1/models")
        response.raise_for_status()
        return str(response.json()["data"][0]["id"])
    except (httpx.HTTPError, ValueError, KeyError, IndexError) as error:
        raise UserError(f"no OpenAI-compatible server answers at {client.base_url}: {error}") from error


@dataclass(frozen=True)
class Result:
    """What a load gave: wall-clock seconds, and by how many seconds the client itself was late at worst."""

    model: str
    served: list[Served]
    seconds: float
    late: float


def measure(
    url: str, shots: Sequence[Shot], progress: Progress, transport: httpx.AsyncBaseTransport | None = None
) -> Result:
    """Run a load against a server. Raises UserError if none answers."""

    async def run() -> Result:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        async with httpx.AsyncClient(base_url=url, timeout=None, limits=limits, transport=transport) as client:
            load = Load(client, await served_model(client))
            start = time.perf_counter()
            served = await load.run(shots, progress)
            return Result(load.model, served, time.perf_counter() - start, load.late)

    return asyncio.run(run())
