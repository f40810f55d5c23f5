"""The simulator beside the real engine: by a clock that goes with the rows it runs, every request gets its tokens at
the same moments, under every schedule, with preemptions and shared prefixes."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import pytest
import torch

from phasewise import catalog
from phasewise.engine.engine import Engine
from phasewise.plan.sequence import SimulatedRequest
from phasewise.plan.simulate import run
from phasewise.request.params import SLO, Params
from phasewise.request.request import Request
from tests import tiny
from tests.plan.scenarios import Linear, scenario
from tests.seeds import draw

COST = Linear(base=0.01, row=1e-4)
TARGET = SLO(0.3, 0.02)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Steps this small are only slowed down by more."""
    was = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(was)


class Clock:
    """Shows when the step under way will be over as soon as its rows have run, and when it began before that."""

    def __init__(self) -> None:
        self.began = 0.0
        self.engine: Engine | None = None
        self.seen = 0

    def __call__(self) -> float:
        assert self.engine is not None
        done = self.engine.counters.row_layers - self.seen
        return self.began + (COST.base + COST.row * done / self.engine.model.config.layers if done else 0.0)

    def over(self) -> None:
        assert self.engine is not None
        self.began, self.seen = self(), self.engine.counters.row_layers


def asked(n: int, prefix: int, seed: int = 3) -> list[tuple[float, list[int], int]]:
    rng, now, found = Random(seed), 0.0, []
    shared = tiny.prompts(prefix)[0] if prefix else []
    for _ in range(n):
        now += rng.expovariate(40.0)
        own = [rng.randrange(3, tiny.VOCAB) for _ in range(rng.randint(5, 60))]
        found.append((now, shared + own, rng.randint(1, 80)))
    return found


def real(loads: list[tuple[float, list[int], int]], schedule: str, **limits: object) -> tuple[list[Request], Engine]:
    clock = Clock()
    placed = tiny.engine({"schedule": schedule}, clock=clock, **limits)
    assert isinstance(placed, Engine)
    clock.engine = placed
    todo, made = list(loads), []
    while todo or not placed.idle:
        if placed.idle and todo:
            clock.began = max(clock.began, todo[0][0])
        while todo and todo[0][0] <= clock.began:
            arrival, tokens, new = todo.pop(0)
            request = Request(tokens, Params(max_tokens=new, ignore_eos=True), slo=TARGET)
            placed.add(request)
            request.trace.arrived = arrival  # it came while a step ran
            made.append(request)
        placed.step()
        clock.over()
    return made, placed


def virtual(loads: list[tuple[float, list[int], int]], schedule: str, **more: object) -> list[SimulatedRequest]:
    jobs = [SimulatedRequest(str(i), tokens, new, at, TARGET) for i, (at, tokens, new) in enumerate(loads)]
    run(scenario(COST, schedule=schedule, layers=4, **more), jobs)  # type: ignore[arg-type]
    return jobs


@pytest.mark.parametrize(("rows", "prefix"), [(1 << 16, 0), (320, 0), (1 << 16, 64), (384, 64)])
@pytest.mark.parametrize(
    "schedule", draw(__name__).sample([*sorted(catalog.names("schedule")), "sarathi:budget=64"], 2)
)
def test_the_same_moments(schedule: str, rows: int, prefix: int) -> None:
    """`rows`: of KV in the budget; in the small ones requests are preempted, and prefixes make way."""
    loads = asked(12, prefix)
    probe = tiny.engine()
    assert isinstance(probe, Engine)
    kv_bytes = rows * probe.store.row_bytes
    caching = prefix > 0
    made, engine = real(loads, schedule, kv_bytes=kv_bytes, prefix_cache=caching)
    scale = probe.store.row_bytes / 1024  # the scenario's rows have bytes of their own
    jobs = virtual(loads, schedule, kv_bytes=int(kv_bytes / scale), prefix_cache=caching)
    assert rows > 1000 or engine.counters.preemptions, "this budget is meant to be tight"
    assert not prefix or rows < 1000 or engine.counters.prefix_hits
    for request, job in zip(made, jobs, strict=True):
        assert job.finished and request.left is not None and request.left.how == "finished"
        assert job.first_token == pytest.approx(request.first_token), job.id
        assert job.last_token == pytest.approx(request.last_token), job.id
