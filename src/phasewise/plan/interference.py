"""Measures how much longer a worker's steps take while another one is busy on the same machine."""

from __future__ import annotations

import multiprocessing
import os
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.synchronize import Event

import torch

from phasewise.cluster.process import run_on
from phasewise.cluster.shared_pool_policy import cores_here
from phasewise.engine.limits import Limits
from phasewise.errors import UserError
from phasewise.plan.beside import Beside
from phasewise.plan.fit import Path
from phasewise.plan.profiler import Size, StepProfiler, spared

SIZES: Mapping[Path, Sequence[Size]] = {
    "prefill": (Size(64, 0, 64), Size(256, 0, 256)),
    "decode": (Size(0, 1, 256), Size(0, 8, 256)),
}
LONG = 256  # steps that a busy worker makes before it sets up new requests
PATIENCE = 300.0  # seconds for a busy worker to load its model


@dataclass(frozen=True)
class BusyWorker:
    """Another process with an engine of its own: model, dtype, methods and limits, its number of threads, and the cores
    that these may run on (None: all)."""

    model: str
    dtype: str
    verbs: Mapping[str, str]
    limits: Limits
    threads: int
    cores: Sequence[int] | None = None
    weights: str | None = None  # the form that they are rounded into


def around(profiler: StepProfiler, like: BusyWorker, rounds: int) -> tuple[Beside, Beside]:
    """Measure how much longer steps take beside a busy worker `like` this, on cores of its own and on a shared core.

    On a shared core one of the two has all cores, and the other a single one of them, as at the ends of the scale along
    which a placement moves cores. Each table is empty where the machine has too few cores for it."""
    there, threads = cores_here(), like.threads
    beside: Beside = {}
    shared: Beside = {}
    if 2 * threads <= len(there):
        beside = measure(profiler, like, rounds)
    if len(there) > 1 and threads == len(there):
        shared = measure(profiler, replace(like, threads=1, cores=there[-1:]), rounds)
    elif len(there) > 1 and threads == 1:
        shared = measure(profiler, replace(like, threads=len(there)), rounds, there[-1:])
    return beside, shared


def measure(profiler: StepProfiler, busy: BusyWorker, rounds: int, cores: Sequence[int] | None = None) -> Beside:
    """Steps alone, and beside another process that runs steps of one kind without end: the median over sizes of the
    ratios. `cores`: those that the steps measured may run on meanwhile (None: all).

    Raises UserError if the process does not come up.
    """
    alone = {mine: _seconds(profiler, mine, rounds) for mine in SIZES}
    found: dict[Path, dict[Path, float]] = {mine: {} for mine in SIZES}
    for theirs in SIZES:
        with _busy(busy, theirs), _kept_on(cores):
            beside = {mine: _seconds(profiler, mine, rounds) for mine in SIZES}
        for mine, seconds in beside.items():
            found[mine][theirs] = max(1.0, statistics.median(b / a for a, b in zip(alone[mine], seconds, strict=True)))
    return found


def _seconds(profiler: StepProfiler, kind: Path, rounds: int) -> list[float]:
    """Returns the seconds of each size's steps, in order."""
    return [one.seconds for size in SIZES[kind] for one in profiler.measure(spared(size, profiler.engine), rounds)]


@contextmanager
def _kept_on(cores: Sequence[int] | None) -> Iterator[None]:
    """This process computes on some cores alone meanwhile."""
    if cores is None:
        yield
        return
    threads, before = torch.get_num_threads(), sorted(os.sched_getaffinity(0))
    run_on(cores, threads)
    try:
        yield
    finally:
        run_on(before, threads)


@contextmanager
def _busy(busy: BusyWorker, kind: Path) -> Iterator[None]:
    """Another process computes steps of a kind meanwhile."""
    context = multiprocessing.get_context("spawn")
    ready, stop = context.Event(), context.Event()
    process = context.Process(target=_work, args=(busy, kind, ready, stop), daemon=True)
    process.start()
    started = time.monotonic()
    try:
        while not ready.wait(0.5):
            if not process.is_alive() or time.monotonic() > started + PATIENCE:
                raise UserError("the process that steps were to be measured beside has not started: is there memory "
                                "for the model twice? --alone leaves this out")  # fmt: skip
        yield
    finally:
        stop.set()
        process.join(PATIENCE)
        process.kill()


def _work(busy: BusyWorker, kind: Path, ready: Event, stop: Event) -> None:
    from phasewise.bench.drive import Bench
    from phasewise.bench.prompts import random_prompts
    from phasewise.engine.engine import Engine

    run_on(busy.cores, busy.threads)
    made = Bench.load(busy.model, busy.dtype, weights=busy.weights)
    engine = made.engine(dict(busy.verbs), busy.limits)
    assert isinstance(engine, Engine)
    profiler = StepProfiler(engine, random_prompts(made.model.config.vocab, 1))
    size = spared(SIZES[kind][-1], engine)
    room = made.model.config.max_positions - size.context - 16
    steps = min(LONG, room // max(1, size.prefill) - 1)
    parent = multiprocessing.parent_process()
    assert parent is not None
    with torch.inference_mode():
        while not stop.is_set() and parent.is_alive():
            profiler.keep_at(size, steps, ready.set, stop.is_set)
