"""A load on record: every request's own time stamps, what the server told meanwhile, what it counted."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import Sequence
from typing import Any

from phasewise.bench.latency import ServedRequest
from phasewise.bench.stream import get
from phasewise.errors import UserError

HEARD = 5.0  # seconds that a server may take to say hello


class Ear:
    """Listens to a server's event stream (GET /events) while a load runs. `why`: why nothing was heard."""

    def __init__(self, url: str) -> None:
        self.rows: list[dict[str, Any]] = []
        self.why: str | None = None
        self._url, self._kind = url, ""
        self._first: float | None = None  # time of the first event, by the server's clock
        self._hello = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Ear:
        self._task = asyncio.create_task(self._listen())
        try:
            await asyncio.wait_for(self._hello.wait(), HEARD)
        except TimeoutError:
            self.why = f"no event within {HEARD:g} s"
        return self

    async def __aexit__(self, *problem: object) -> None:
        assert self._task is not None
        await asyncio.sleep(0.2)  # the last request's end is told after its answer
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _listen(self) -> None:
        try:
            await get(f"{self._url}/events", self._line)
        except (OSError, UserError, ValueError, KeyError) as error:
            self.why = f"{type(error).__name__}: {error}"
        self._hello.set()

    def _line(self, line: bytes) -> None:
        field, _, value = line.partition(b": ")
        if field == b"event":
            self._kind = value.decode()
        elif field == b"data":
            self.rows.append({"event": self._kind, **self._timed(json.loads(value))})
            self._hello.set()

    def _timed(self, data: dict[str, Any]) -> dict[str, Any]:
        """Its time, if it has one, as seconds after the first: the server's clock may have begun at any time."""
        if "at" not in data:
            return data
        self._first = data["at"] if self._first is None else self._first
        return data | {"at": round(data["at"] - self._first, 6)}


def stamps(served: Sequence[ServedRequest], start: float) -> list[dict[str, Any]]:
    """A row for every request: when it was due, when its tokens came, seconds after `start`, and how many at a time."""
    return [
        {
            "served": number, "due": round(one.trace.arrived - start, 6),
            "tokens": [round(at - start, 6) for at in one.trace.tokens], "counts": one.trace.counts,
            "prompt_tokens": one.prompt_tokens, "error": one.error,
        }
        for number, one in enumerate(served)
    ]  # fmt: skip


def counted(url: str) -> dict[str, float]:
    """The server's own counters as /metrics has them, in all; empty where it has none."""
    try:
        with urllib.request.urlopen(f"{url}/metrics", timeout=5) as answer:
            lines = answer.read().decode().splitlines()
    except (OSError, ValueError):
        return {}
    found: dict[str, float] = {}
    for line in lines:
        name, _, value = line.rpartition(" ")
        short = name.removeprefix("phasewise_").removesuffix("_total")
        if len(short) == len(name) - len("phasewise__total") and "{" not in name:
            found[short] = float(value)
    return found
