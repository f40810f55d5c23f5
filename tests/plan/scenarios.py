"""Scenes for tests: costs in closed form, and clusters of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from phasewise import catalog
from phasewise.plan.cost import Cost, Price, StepWork
from phasewise.plan.link import LOCAL, Link
from phasewise.plan.sequence import SimulatedRequest
from phasewise.plan.serving import Serving
from phasewise.plan.simulate import Scenario
from phasewise.plan.simulated_cluster import ClusterLayout
from phasewise.plan.simulated_engine import EngineSettings
from phasewise.verbs.schedule import Scheduler

ROW = 1024  # bytes of KV per token
NOTHING = Serving()  # that a server adds


@dataclass(frozen=True)
class Linear:
    """base + row * rows + prompt * prompt rows: seconds."""

    base: float = 0.0
    row: float = 0.0
    prompt: float = 0.0

    def seconds(self, step: StepWork) -> float:
        return self.base + self.row * step.rows + self.prompt * step.prefill_rows

    def price(self, step: StepWork) -> Price:
        return Price(self.seconds(step))


def scheduler(text: str) -> Callable[[], Scheduler]:
    """Makes a scheduler for each engine, bound as an engine binds it."""

    def make() -> Scheduler:
        made = catalog.build("schedule", text)
        bound: Scheduler = made.bind(None) if hasattr(made, "bind") else made
        return bound

    return make


def scenario(
    cost: Cost, place: str = "colocated", *, schedule: str = "sarathi", kv_bytes: int = 1 << 30, link: Link = LOCAL,
    layers: int = 16, cores: int = 4, prefix_cache: bool = False, max_running: int = 64, costs: Any = None,
    beside: Any = None, shared: Any = None, served: Serving = NOTHING, stages: int = 1, **more: Any,
) -> Scenario:  # fmt: skip
    engine = EngineSettings(
        scheduler(schedule),
        ROW,
        layers,
        max_running,
        prefix_cache,
        stages=stages,
        decodes_all=catalog.build("schedule", schedule).traits.decodes_all,
    )
    layout = ClusterLayout(engine, costs or (lambda role, threads: cost), lambda spec: int(kv_bytes * spec.share), link,
                           beside=lambda threads: beside or {}, shared=lambda threads: shared or {},
                           served=served)  # fmt: skip
    return Scenario(layout, catalog.build("place", place), range(cores), **more)


def in_turn(jobs: Sequence[SimulatedRequest], services: Iterable[float]) -> list[float]:
    """Seconds from arrival to the end of service at one server that serves in order of arrival (Lindley's recursion,
    whose mean is DistServe's M/D/1 form where services are equal and arrivals are those of a Poisson process)."""
    free, found = 0.0, []
    for job, service in zip(jobs, services):
        free = max(free, job.arrived) + service
        found.append(free - job.arrived)
    return found
