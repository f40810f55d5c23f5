"""Measures how much longer a worker's steps take while another one is busy on the same machine."""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.synchronize import Event

import torch

from phasewise.engine.limits import Limits
from phasewise.errors import UserError
from phasewise.plan.beside import Beside
from phasewise.plan.fit import Path
from phasewise.plan.stand import Size, Stand, spared

SIZES: Mapping[Path, Sequence[Size]] = {
    "prefill": (Size(64, 0, 64), Size(256, 0, 256)),
    "decode": (Size(0, 1, 256), Size(0, 8, 256)),
}
LONG = 256  # steps that a neighbour makes before it sets up new requests
PATIENCE = 300.0  # seconds for a neighbour to load its model


def measure(stand: Stand, neighbour: tuple[str, str, Mapping[str, str], Limits], rounds: int) -> Beside:
    """Steps alone, and beside another process with as many threads that runs steps of one kind without end: the
    median over sizes of the ratios. `neighbour`: model, dtype, methods and limits of that process's engine.

    Raises UserError if it does not come up.
    """
    alone = {mine: _seconds(stand, mine, rounds) for mine in SIZES}
    found: dict[Path, dict[Path, float]] = {mine: {} for mine in SIZES}
    for theirs in SIZES:
        with _busy(neighbour, theirs):
            beside = {mine: _seconds(stand, mine, rounds) for mine in SIZES}
        for mine, seconds in beside.items():
            found[mine][theirs] = max(1.0, statistics.median(b / a for a, b in zip(alone[mine], seconds, strict=True)))
    return found


def _seconds(stand: Stand, kind: Path, rounds: int) -> list[float]:
    """Of each size's steps, in order."""
    return [one.seconds for size in SIZES[kind] for one in stand.measure(spared(size, stand.engine), rounds)]


@contextmanager
def _busy(neighbour: tuple[str, str, Mapping[str, str], Limits], kind: Path) -> Iterator[None]:
    """Another process computes steps of a kind meanwhile."""
    context = multiprocessing.get_context("spawn")
    ready, stop = context.Event(), context.Event()
    process = context.Process(target=_work, args=(neighbour, kind, torch.get_num_threads(), ready, stop), daemon=True)
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


def _work(
    neighbour: tuple[str, str, Mapping[str, str], Limits], kind: Path, threads: int, ready: Event, stop: Event
) -> None:
    from phasewise.bench.drive import Bench
    from phasewise.bench.prompts import random_prompts
    from phasewise.engine.engine import Engine

    model, dtype, verbs, limits = neighbour
    torch.set_num_threads(threads)
    made = Bench.load(model, dtype)
    engine = made.engine(dict(verbs), limits)
    assert isinstance(engine, Engine)
    stand = Stand(engine, random_prompts(made.model.config.vocab, 1))
    size = spared(SIZES[kind][-1], engine)
    room = made.model.config.max_positions - size.context - 16
    steps = min(LONG, room // max(1, size.prefill) - 1)
    parent = multiprocessing.parent_process()
    assert parent is not None
    with torch.inference_mode():
        while not stop.is_set() and parent.is_alive():
            stand.keep_at(size, steps, ready.set, stop.is_set)
