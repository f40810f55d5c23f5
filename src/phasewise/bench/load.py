"""Open-loop load over HTTP: requests are sent when they are due, whether or not earlier ones have been answered."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

import aiohttp

from phasewise.bench.latency import Served
from phasewise.bench.workloads import Shot
from phasewise.errors import UserError
from phasewise.request.trace import Trace

Progress = Callable[[int], object]


class Load:
    """A client of one server. Latencies count from when a request was due: a late client hides no slow server."""

    def __init__(
        self, client: aiohttp.ClientSession, model: str, clock: Callable[[], float] = time.perf_counter
    ) -> None:
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
        except (aiohttp.ClientError, UserError, ValueError, KeyError, IndexError) as problem:
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
        async with self.client.post("/v1/completions", json=body) as response:
            if response.status != 200:
                raise UserError(f"HTTP {response.status}: {_message(await response.text(errors='replace'))}")
            tokens = await self._events(response, trace)
        if trace.counts:
            trace.counts[-1] += tokens - sum(trace.counts)

    async def _events(self, response: aiohttp.ClientResponse, trace: Trace) -> int:
        """Stamp the events of a stream; the number of tokens the server counted.

        Where the server tells usage as it goes, every step counts, with text or without; else each piece of text does.
        """
        tokens = 0
        async for line in _lines(response):
            if not line.startswith(b"data:") or line == b"data: [DONE]":
                continue
            event = json.loads(line[5:])
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


async def _lines(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """Whatever has come is split at once: a client that took line by line would be measured instead of its server."""
    rest = b""
    async for part in response.content.iter_any():
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            yield line.rstrip(b"\r")
    yield rest


def _message(body: str) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body[:200]


async def served_model(client: aiohttp.ClientSession, url: str) -> str:
    """The first model a server lists. Raises UserError when there is no OpenAI-compatible server."""
    try:
        async with client.get("/v1/models", raise_for_status=True) as response:
            return str((await response.json())["data"][0]["id"])
    except (aiohttp.ClientError, ValueError, KeyError, IndexError) as error:
        raise UserError(f"no OpenAI-compatible server answers at {url}: {error}") from error


@dataclass(frozen=True)
class Result:
    """What a load gave: wall-clock seconds, and by how many seconds the client itself was late at worst."""

    model: str
    served: list[Served]
    seconds: float
    late: float


def measure(url: str, shots: Sequence[Shot], progress: Progress) -> Result:
    """Run a load against a server. Raises UserError if none answers."""

    async def run() -> Result:
        forever, unlimited = aiohttp.ClientTimeout(total=None), aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(url, timeout=forever, connector=unlimited) as client:
            load = Load(client, await served_model(client, url))
            start = time.perf_counter()
            served = await load.run(shots, progress)
            return Result(load.model, served, time.perf_counter() - start, load.late)

    return asyncio.run(run())
