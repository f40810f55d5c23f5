"""A load on a cluster in virtual time: who was served when, what it took, and the rate at which targets still hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from phasewise.bench.goodput import SHARE
from phasewise.bench.latency import QUANTILES, percentile
from phasewise.cluster.policy import Policy
from phasewise.errors import UserError
from phasewise.plan.arrivals import Load
from phasewise.plan.cluster import Cluster, Layout
from phasewise.plan.job import Job
from phasewise.plan.world import World
from phasewise.request.params import SLO


@dataclass(frozen=True)
class Scene:
    """A placement in virtual time: `policy` makes the policy of one cluster (None: one engine), of which there are
    `replicas`, each request dealt to one of them by chance. `deaths`: (seconds, worker) of all clusters, counted
    through. `lag`: seconds of each request outside of its engine."""

    layout: Layout
    policy: Callable[[], Policy | None]
    replicas: int = 1
    deaths: Sequence[tuple[float, int]] = ()
    seed: int = 0
    lag: float = 0.0


@dataclass(frozen=True)
class Outcome:
    """What became of a load. `seconds`: until the last request left; `workers`: how many there are."""

    jobs: Sequence[Job]
    clusters: Sequence[Cluster]
    seconds: float

    @property
    def workers(self) -> int:
        return sum(len(cluster.members) for cluster in self.clusters)

    def share(self, slo: SLO) -> float:
        """Of the requests, those that came in full and within the targets."""
        return sum(job.meets(slo) for job in self.jobs) / len(self.jobs)

    def numbers(self, slo: SLO | None = None) -> dict[str, Any]:
        """Flat numbers, times in seconds, by the names that benchmarks give them."""
        good = [job for job in self.jobs if job.left == "finished"]
        stations = [station for cluster in self.clusters for station in cluster.stations]
        moved = [seconds for cluster in self.clusters for seconds in cluster.handoff_seconds]
        found: dict[str, Any] = {
            "requests": len(self.jobs),
            "failed": len(self.jobs) - len(good),
            "seconds": self.seconds,
            "workers": self.workers,
            "requests_per_s": len(good) / self.seconds if self.seconds else 0.0,
            "output_tokens_per_s": sum(job.n_out for job in good) / self.seconds if self.seconds else 0.0,
        }
        series = {"ttft": [job.ttft for job in good], "tpot": [job.tpot for job in good]}
        for name, values in series.items():
            known = [value for value in values if value is not None]
            found |= {f"{name}_p{q * 100:.0f}_s": percentile(known, q) for q in QUANTILES}
        found |= {
            "busy_share": sum(station.busy for station in stations) / (self.workers * self.seconds or 1.0),
            "steps": sum(station.counters.steps for station in stations),
            "preemptions": sum(station.counters.preemptions for station in stations),
            "prefix_hits": sum(station.counters.prefix_hits for station in stations),
            "recomputed": sum(station.counters.recomputed for station in stations),
            "drafted": sum(station.counters.drafted for station in stations),
            "accepted": sum(station.counters.accepted for station in stations),
            "handoffs": sum(cluster.handoffs for cluster in self.clusters),
            "handoff_mean_s": sum(moved) / len(moved) if moved else None,
            "kv_bytes_sent": sum(cluster.sent_bytes for cluster in self.clusters),
            "workers_lost": sum(cluster.lost for cluster in self.clusters),
            "restarts": sum(cluster.restarts for cluster in self.clusters),
            "joules": _known([station.joules for station in stations if station.busy]),
            "money": _known([station.money for station in stations if station.busy]),
        }
        if slo is not None and (slo.ttft is not None or slo.tpot is not None):
            found |= {"ttft_target_s": slo.ttft, "tpot_target_s": slo.tpot, "good_share": self.share(slo)}
        return found


def _known(spent: Sequence[float]) -> float | None:
    """What all have spent; None where it is not known of somebody."""
    return sum(spent) if spent and all(spent) else None


def run(scene: Scene, jobs: Sequence[Job], tell: Callable[[int], object] = lambda done: None) -> Outcome:
    """Let everybody arrive and leave; `tell` hears, now and then, how many have left."""
    world, left, dealt = World(), list[Job](), Random(scene.seed)

    def over(job: Job) -> None:
        left.append(job)
        if not len(left) % 256:
            tell(len(left))

    clusters = [Cluster(world, scene.layout, scene.policy(), over) for _ in range(scene.replicas)]

    def arrive(number: int) -> None:
        if number + 1 < len(jobs):
            world.at(jobs[number + 1].arrived + scene.lag, arrive, number + 1)
        cluster = clusters[0] if len(clusters) == 1 else clusters[dealt.randrange(len(clusters))]
        cluster.add(jobs[number])

    each = len(clusters[0].members)
    for when, worker in scene.deaths:
        if not 0 <= worker < each * len(clusters):
            raise UserError(f"worker {worker} cannot die: there are {each * len(clusters)}, from 0 on")
        if clusters[0].policy is None:
            raise UserError(
                "one engine has no router that would start its requests again: choose a placement with workers"
            )
        world.at(when, clusters[worker // each].kill, worker % each)
    if jobs:
        world.at(jobs[0].arrived + scene.lag, arrive, 0)
    world.run()
    last = max((job.last_token for job in left if job.last_token is not None), default=world.now)
    return Outcome(jobs, clusters, last)


@dataclass(frozen=True)
class Best:
    """The highest rate at which a share of the requests stayed within the targets, and that share. `bounded`: a higher
    rate was tried and failed."""

    rate: float
    share: float
    bounded: bool
    tried: int


def goodput(scene: Scene, load: Load, slo: SLO, share: float = SHARE, precision: float = 0.02) -> Best:
    """Bisection on the rate, to a part `precision` of it (DistServe's search, with both targets for each request)."""

    def at(rate: float) -> float:
        return run(scene, load.jobs(slo, rate)).share(slo)

    low, reached, tried = 0.0, 0.0, 0
    high = load.rate or 1.0
    while True:  # a rate that fails
        tried += 1
        found = at(high)
        if found < share:
            break
        low, reached, high = high, found, 2 * high
        if tried == 24:
            return Best(low, reached, False, tried)
    while high - low > precision * high and tried < 64:
        middle = (low + high) / 2
        tried += 1
        found = at(middle)
        if found >= share:
            low, reached = middle, found
        else:
            high = middle
        if high < 1e-6:
            break
    return Best(low, reached, True, tried)
