"""Playing a load on an engine, and keeping what every step did."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from phasewise.errors import UserError
from phasewise.request.counters import Counters
from phasewise.request.params import Params
from phasewise.request.request import Request
from phasewise.verbs.place import Placed

QUIET, PATIENCE = 0.25, 30.0  # seconds without news after which workers have said everything, or never will


@dataclass(frozen=True, slots=True)
class LoadEntry:
    """A request that is made once the first one has emitted `after` tokens; the end token is ignored. At a
    temperature each request of a load draws by a seed of its own.

    The first `shared` tokens of its prompt have been asked for before. `edits` numbers an entry whose KV it may go on
    from, where the methods can; the others compute its prompt. `ask` is what it asks of a method by name; a request
    that asks for something ends where that ends.
    """

    prompt: list[int]
    new: int
    after: int = 0
    shared: int = 0
    temperature: float = 0.0
    edits: int | None = None
    ask: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class PlayedStep:
    """One step: rows run, rows that requests wanted to bring, streams (requests that decode) and those that got on."""

    rows: int
    wanted: int
    streams: int
    advanced: int
    kv: int  # bytes of the committed rows of all requests
    read: int  # bytes of KV


@dataclass(frozen=True)
class PlayedRun:
    """A load as it was played."""

    entries: Sequence[LoadEntry]
    requests: Sequence[Request]
    work: Counters
    seconds: float
    peak_kv: int
    steps: Sequence[PlayedStep]  # empty unless they were watched

    @property
    def outs(self) -> list[list[int]]:
        return [request.out for request in self.requests]

    @property
    def early(self) -> list[Request]:
        """Requests that were there from the start."""
        return [request for request, entry in zip(self.requests, self.entries) if not entry.after]

    @property
    def late(self) -> list[Request]:
        """Those that came later."""
        return [request for request, entry in zip(self.requests, self.entries) if entry.after]

    @property
    def decoding(self) -> list[PlayedStep]:
        """Steps in which all requests decode, each with one row."""
        return [step for step in self.steps if step.streams == step.rows == len(self.requests)]

    def stall(self) -> int:
        """The most rows that were run between two tokens of any stream."""
        most = held = 0
        for step in self.steps:
            held += step.rows
            if step.advanced >= step.streams > 0:
                most, held = max(most, held), 0
            elif not step.streams:
                held = 0
        return most


def play(engine: Placed, entries: Sequence[LoadEntry], watch: bool = True, most: int = 200_000) -> PlayedRun:
    """Run all of them to their end. Raises UserError if one of them fails."""
    ask(engine, {tuple(entry.prompt[: entry.shared]) for entry in entries if entry.shared})
    requests: list[Request] = []
    for seed, entry in enumerate(entries):
        params = Params(entry.new, entry.temperature, seed=seed, ignore_eos=entry.ask is None)
        params = params if entry.ask is None else replace(params, ask=dict(entry.ask))
        if entry.edits is not None:
            params = going_on(engine, params, requests[entry.edits])
        requests.append(Request(entry.prompt, params))
    before, peak, steps = copy.copy(engine.counters), 0, list[PlayedStep]()
    pending = sorted(zip(entries, requests), key=lambda pair: pair[0].after)
    start = time.perf_counter()
    with torch.inference_mode():
        for _ in range(most):
            while pending and requests[0].n_out >= pending[0][0].after:
                engine.add(pending.pop(0)[1])
            if all(request.left is not None for request in requests):
                break
            if watch:
                steps.append(_watched(engine, requests))
            else:
                engine.step()
            peak = max(peak, engine.kv_bytes)
    seconds = time.perf_counter() - start
    for request in requests:
        if request.left is None or request.left.how != "finished":
            raise UserError(f"a request did not finish: {request.left and request.left.reason}")
    settle(engine)
    return PlayedRun(entries, requests, engine.counters - before, seconds, peak, steps)


def going_on(engine: Placed, params: Params, other: Request) -> Params:
    """The same, asking for the KV that another request leaves, where that can be asked for."""
    asking = replace(params, ask={"after": other.id})
    try:
        engine.prepare(asking, "")
    except UserError:
        return params
    return asking


def _watched(engine: Placed, requests: Sequence[Request]) -> PlayedStep:
    here = [request for request in requests if request.left is None and request.layers]
    streams = {request.id: request.n_out for request in here if not request.prefilling and request.n_out}
    wanted = sum(request.prompt_len - request.computed if request.prefilling else 1 for request in here)
    rows, read = engine.counters.rows, engine.counters.kv_bytes_read
    engine.step()
    advanced = sum(request.n_out > streams.get(request.id, request.n_out) for request in here)
    kv = sum(request.kv.live_bytes for request in requests if request.kv is not None)
    now = engine.counters
    return PlayedStep(now.rows - rows, wanted, len(streams), advanced, kv, now.kv_bytes_read - read)


def settle(engine: Placed) -> None:
    """Let workers elsewhere say what is left to be said: the last step's numbers come after its tokens."""
    if not engine.workers:
        return
    known, since = engine.counters, time.perf_counter()
    while not engine.idle or time.perf_counter() - since < QUIET:
        engine.step()
        if engine.counters != known:
            known, since = engine.counters, time.perf_counter()
        if time.perf_counter() - since > PATIENCE:
            raise UserError("workers do not come to rest")


def ask(engine: Placed, beginnings: set[tuple[int, ...]]) -> None:
    """Beginnings that somebody has asked for before."""
    asked = [Request(beginning, Params(max_tokens=1, ignore_eos=True)) for beginning in sorted(beginnings)]
    for request in asked:
        engine.add(request)
    while any(request.left is None for request in asked):
        engine.step()


def finish(engine: Placed, requests: Sequence[Request], tell: Callable[[int], object] = lambda done: None) -> None:
    """Add requests and step until all have left. Raises UserError if one of them fails."""
    for request in requests:
        engine.add(request)
    with torch.inference_mode():
        while (done := sum(request.left is not None for request in requests)) < len(requests):
            engine.step()
            tell(done)
    failed = next((r.left for r in requests if r.left is not None and r.left.how != "finished"), None)
    if failed is not None:
        raise UserError(f"a request failed: {failed.reason}")
    tell(len(requests))
