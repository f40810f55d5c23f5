"""Running a workload on an engine in this process, and counting what it cost."""

from __future__ import annotations

import copy
import gc
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from phasewise.bench.held import lying
from phasewise.bench.latency import ServedRequest
from phasewise.bench.workloads import Shot
from phasewise.builder import Builder
from phasewise.engine.limits import Limits
from phasewise.load import dtype_of, load_model
from phasewise.model.model import Model
from phasewise.options import parse
from phasewise.request.counters import Counters
from phasewise.request.params import SLO, Params
from phasewise.request.request import Request
from phasewise.verbs.place import Placed

Progress = Callable[[int], object]


@dataclass(frozen=True, slots=True)
class HeldKV:
    """The KV bytes of a request at its last token: `live` bytes of rows and of what is kept beside them and
    in drawers, and `booked` ones, which is what the budget counts: room to grow included, the prefix cache left out."""

    live: int
    booked: int


@dataclass(frozen=True)
class Drive:
    """One run: wall-clock seconds, work done, the most KV bytes held, the requests with their time stamps, and what
    each of them held where this process could see that."""

    seconds: float
    work: Counters
    peak_kv: int
    requests: list[Request]
    held: list[HeldKV] = field(default_factory=list)

    @property
    def served(self) -> list[ServedRequest]:
        return [ServedRequest(r.trace, r.prompt_len, _reason(r)) for r in self.requests]

    @property
    def tokens_per_s(self) -> float:
        return sum(r.n_out for r in self.requests) / self.seconds


def _reason(request: Request) -> str | None:
    assert request.left is not None
    return None if request.left.how == "finished" else request.left.reason


class Bench:
    """A model from which engines with different methods are made; weights are shared, second models loaded once."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self._loaded: dict[str, Model] = {}

    @classmethod
    def load(cls, name: str, dtype: str | None = None, device: str = "cpu", weights: str | None = None) -> Bench:
        model = load_model(name, dtype=dtype_of(dtype), device=device, weights=weights)
        gc.freeze()  # as the server does: a look at all that was imported would be timed with whoever happens to run
        return cls(model)

    def engine(self, verbs: dict[str, str], limits: Limits, **replaced: Any) -> Placed:
        """A fresh engine; `replaced` are methods given as objects. Raises UserError for what does not fit."""
        return Builder(self.model, {**parse(verbs), **replaced}, limits, load=self._second).build()

    def second(self, name: str) -> Bench:
        """The same for a second model, in the first one's precision and where that one is."""
        return Bench(self._second(name))

    def _second(self, name: str) -> Model:
        if name not in self._loaded:
            self._loaded[name] = load_model(name, dtype=self.model.dtype, device=str(self.model.device))
        return self._loaded[name]


def drive(
    engine: Placed, shots: Sequence[Shot], progress: Progress = lambda done: None, slo: SLO | None = None
) -> Drive:
    """Add all requests at once (arrivals are ignored), greedy, the end token ignored; step until all have left.

    What prompts share is asked for before the clock starts, as a service in use has met its system prompt before.
    """
    _ask(engine, {tuple(shot.prompt[: shot.shared]) for shot in shots if shot.shared})
    requests = [Request(shot.prompt, Params(max_tokens=shot.new, ignore_eos=True), slo=slo) for shot in shots]
    held: list[HeldKV] = []
    for request in requests:
        request.watch = partial(note, request, held)
    before, peak, done = copy.copy(engine.counters), 0, 0
    start = time.perf_counter()
    for request in requests:
        engine.add(request)
    with torch.inference_mode():  # once, instead of in every step
        while done < len(requests):
            engine.step()
            peak = max(peak, engine.kv_bytes)
            done = sum(request.left is not None for request in requests)
            progress(done)
    return Drive(time.perf_counter() - start, engine.counters - before, peak, requests, held)


def note(request: Request, held: list[HeldKV], token: int) -> bool:
    """Told each token: at the last one, what the request holds. It never asks to stop."""
    kv = request.kv
    if kv is not None and request.n_out >= request.params.max_tokens:
        live = kv.live_bytes + kv.derived_bytes + (lying(request.state) if kv.drawn else 0)
        held.append(HeldKV(live, kv.bytes + kv.beside))
    return False


def _ask(engine: Placed, beginnings: Iterable[tuple[int, ...]]) -> None:
    asked = [Request(beginning, Params(max_tokens=1, ignore_eos=True)) for beginning in beginnings]
    for request in asked:
        engine.add(request)
    while any(request.left is None for request in asked):
        engine.step()
