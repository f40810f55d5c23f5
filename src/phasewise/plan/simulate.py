"""A load on a cluster in virtual time: who was served when, what it took, and the rate at which targets still hold."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random
from typing import Any, Protocol

import phasewise.cluster
from phasewise.bench.goodput import SHARE
from phasewise.bench.latency import TAIL, percentile, quantiles
from phasewise.cluster.policy import Policy
from phasewise.errors import UserError
from phasewise.plan.arrivals import Load
from phasewise.plan.event_loop import Turn
from phasewise.plan.misses import Met, Missed, MissWatch
from phasewise.plan.sequence import SimulatedRequest
from phasewise.plan.simulated_cluster import ClusterLayout, SimulatedCluster
from phasewise.plan.slowdown import Slowdowns, SlowdownWatch
from phasewise.request.counters import Counters
from phasewise.request.params import SLO
from phasewise.verbs.place import Placing

LEAST, MOST = 1e-4, 1e8  # requests/s, between which rates are looked for
DELAY = 2.0  # seconds of median scheduling delay, up to which a rate is taken to be carried


@dataclass(frozen=True)
class Scenario:
    """A placement in virtual time: `placing` is a method of the verb place, on machines with these `cores`. Of its
    clusters there are `replicas`, each request dealt to one of them by chance. `deaths`: (seconds, worker) of all
    clusters, counted through. `lag`: seconds of each request outside of its engine."""

    layout: ClusterLayout
    placing: Placing
    cores: Sequence[int] = (0,)
    replicas: int = 1
    deaths: Sequence[tuple[float, int]] = ()
    seed: int = 0
    lag: float = 0.0

    def policy(self) -> Policy | None:
        """Returns the policy of one cluster's router; None if all runs in one engine."""
        return self.placing.policy(0.0, self.cores)


class Watch(Protocol):
    """Hears of every request that comes and leaves, and of each cluster's end. It may end a simulation by raising."""

    def arrived(self, job: SimulatedRequest, now: float) -> None: ...
    def left(self, job: SimulatedRequest, now: float) -> None: ...
    def over(self) -> None: ...


@dataclass(frozen=True)
class LoadOutcome:
    """The outcome of a load. `seconds`: until the last request left; `workers`: the number of workers."""

    jobs: Sequence[SimulatedRequest]
    clusters: Sequence[SimulatedCluster]
    seconds: float

    @property
    def workers(self) -> int:
        return sum(len(cluster.workers) for cluster in self.clusters)

    def share(self, slo: SLO) -> float:
        """Returns the share of requests that finished within the targets."""
        return sum(job.meets(slo) for job in self.jobs) / len(self.jobs)

    def numbers(self, slo: SLO | None = None) -> dict[str, Any]:
        """Flat numbers, times in seconds, by the names that benchmarks give them."""
        good = [job for job in self.jobs if job.finished]
        found: dict[str, Any] = {
            "requests": len(self.jobs),
            "failed": len(self.jobs) - len(good),
            "seconds": self.seconds,
            "workers": self.workers,
            "requests_per_s": len(good) / self.seconds if self.seconds else 0.0,
            "output_tokens_per_s": sum(job.n_out for job in good) / self.seconds if self.seconds else 0.0,
        }
        found |= quantiles("ttft", [ttft for job in good if (ttft := job.ttft) is not None])
        found |= quantiles("tpot", [tpot for job in good if (tpot := job.tpot) is not None])
        if any(job.stamps.tokens is not None for job in self.jobs):
            found |= quantiles("tbt", [gap for job in good for gap in job.tbt])
        found |= self._work()
        if slo:
            found |= {"ttft_target_s": slo.ttft, "tpot_target_s": slo.tpot, "tbt_target_s": slo.tbt}
            found["good_share"] = self.share(slo)
        return found

    def _work(self) -> dict[str, Any]:
        """The part of `numbers` that says what the workers have done."""
        engines = [engine for cluster in self.clusters for engine in cluster.engines]
        done = sum((engine.counters for engine in engines), Counters())
        routers = [cluster.router.counters for cluster in self.clusters if cluster.router is not None]
        moved = [job.trace.handoff for job in self.jobs if job.trace.handoff is not None]
        return {
            "busy_share": sum(engine.busy for engine in engines) / (self.workers * self.seconds or 1.0),
            "steps": done.steps,
            "preemptions": done.preemptions,
            "prefix_hits": done.prefix_hits,
            "recomputed": done.recomputed,
            "drafted": done.drafted,
            "accepted": done.accepted,
            "handoffs": done.handoffs,
            "handoff_mean_s": sum(moved) / len(moved) if moved else None,
            "kv_bytes_sent": done.kv_bytes_sent,
            "workers_lost": sum(counters.workers_lost for counters in routers),
            "restarts": sum(counters.restarts for counters in routers),
            "joules": _known([engine.joules for engine in engines if engine.busy]),
            "money": _known([engine.money for engine in engines if engine.busy]),
        }


def _known(spent: Sequence[float]) -> float | None:
    """Returns the sum of what all have spent; None where it is unknown for one of them."""
    return sum(spent) if spent and all(spent) else None


def share_at_least(scenario: Scenario, jobs: Sequence[SimulatedRequest], slo: SLO, share: float) -> float:
    """The share of requests within their targets if it is at least `share`. Otherwise 0, as soon as that is sure: a
    hopeless rate costs a part of the simulation."""
    try:
        return run(scenario, jobs, watch=MissWatch(slo, share, len(jobs))).share(slo)
    except Missed:
        return 0.0


def reaches(scenario: Scenario, jobs: Sequence[SimulatedRequest], slo: SLO, share: float) -> bool:
    """True if at least this share of requests is within its targets, known as soon as it is sure."""
    try:
        return run(scenario, jobs, watch=MissWatch(slo, share, len(jobs), early=True)).share(slo) >= share
    except Met:
        return True
    except Missed:
        return False


def within(scenario: Scenario, jobs: Sequence[SimulatedRequest], slowdowns: Slowdowns) -> bool:
    """True if all conditions hold; that they do not is known as soon as it is sure."""
    try:
        return slowdowns.over(run(scenario, jobs, watch=SlowdownWatch(slowdowns, jobs)).jobs) <= 1.0
    except Missed:
        return False


def run(
    scenario: Scenario,
    jobs: Sequence[SimulatedRequest],
    tell: Callable[[int], object] = lambda done: None,
    watch: Watch | None = None,
) -> LoadOutcome:
    """Let everybody arrive and leave; `tell` hears, now and then, how many have left. Raises what `watch` raises."""
    left = list[SimulatedRequest]()

    def over(job: SimulatedRequest) -> None:
        left.append(job)
        if watch is not None:
            watch.left(job, now())
        if not len(left) % 256:
            tell(len(left))

    def now() -> float:
        return turn.loop.now

    def made() -> SimulatedCluster:
        return SimulatedCluster(scenario.layout, scenario.placing, scenario.cores, over)

    clusters = [made() for _ in range(scenario.replicas)]
    turn = clusters[0]  # whose requests come and go
    each = len(clusters[0].workers)
    _check_deaths(scenario, clusters)
    with _quiet():
        for number, (cluster, own) in enumerate(zip(clusters, _dealt(jobs, scenario), strict=True)):
            for when, worker in scenario.deaths:
                if worker // each == number:
                    cluster.loop.at(when, Turn.ARRIVE, cluster.kill, worker % each)
            turn = cluster
            _arrive_at(cluster, own, scenario.lag, watch)
            cluster.run()
            if watch is not None:
                watch.over()
    end = max(cluster.loop.now for cluster in clusters)
    return LoadOutcome(jobs, clusters, max((job.last_token for job in left if job.last_token is not None), default=end))


def _check_deaths(scenario: Scenario, clusters: Sequence[SimulatedCluster]) -> None:
    """Raise UserError for workers that are not there, and for an engine that nobody looks after."""
    each = len(clusters[0].workers)
    for _, worker in scenario.deaths:
        if not 0 <= worker < each * len(clusters):
            raise UserError(f"worker {worker} cannot die: there are {each * len(clusters)}, from 0 on")
        if clusters[0].router is None:
            raise UserError(
                "one engine has no router that would start its requests again: choose a placement with workers"
            )


def _dealt(jobs: Sequence[SimulatedRequest], scenario: Scenario) -> list[list[SimulatedRequest]]:
    """The requests of each cluster, dealt by chance."""
    found: list[list[SimulatedRequest]] = [[] for _ in range(scenario.replicas)]
    chance = Random(scenario.seed)
    for job in jobs:
        found[chance.randrange(scenario.replicas) if scenario.replicas > 1 else 0].append(job)
    return found


def _arrive_at(cluster: SimulatedCluster, jobs: Sequence[SimulatedRequest], lag: float, watch: Watch | None) -> None:
    """Let requests arrive, each scheduled by the one before it."""

    def arrive(number: int) -> None:
        if number + 1 < len(jobs):
            cluster.loop.at(jobs[number + 1].arrived + lag, Turn.ARRIVE, arrive, number + 1)
        if watch is not None:
            watch.arrived(jobs[number], cluster.loop.now)
        cluster.add(jobs[number])

    if jobs:
        cluster.loop.at(jobs[0].arrived + lag, Turn.ARRIVE, arrive, 0)


@contextmanager
def _quiet() -> Iterator[None]:
    """Let no simulated death be logged as if workers had died."""
    log = logging.getLogger(phasewise.cluster.__name__)
    was = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(was)


@dataclass(frozen=True)
class Best:
    """The highest rate at which a share of the requests stayed within the targets, and that share. `bounded`: a higher
    rate was tried and failed."""

    rate: float
    share: float
    bounded: bool
    tried: int


def goodput(scenario: Scenario, load: Load, slo: SLO, share: float = SHARE, precision: float = 0.02) -> Best:
    """The highest rate at which a share of the requests meets all targets (DistServe's search, with all targets for
    each request)."""

    def at(rate: float) -> float:
        return share_at_least(scenario, load.jobs(slo, rate), slo, share)

    return highest(at, share, load.rate or 1.0, precision)


def capacity(scenario: Scenario, load: Load, tbt: float, delay: float = DELAY, precision: float = 0.02) -> Best:
    """Capacity as arXiv 2403.02310 has it: the highest rate at which the 99th percentile of the times between
    tokens, of all streams together, is at most `tbt` seconds and the median scheduling delay at most `delay` seconds.
    The share that is returned with it is 1 where both hold. Requests that fail count as a missed target."""

    def at(rate: float) -> float:
        jobs = run(scenario, load.jobs(SLO(tbt=tbt), rate)).jobs
        if not all(job.finished for job in jobs):
            return 0.0
        tail = percentile([gap for job in jobs for gap in job.tbt], TAIL)
        waited = percentile([job.waited for job in jobs if job.waited is not None], 0.5)
        return float((tail is None or tail <= tbt) and (waited is None or waited <= delay))

    return highest(at, 1.0, load.rate or 1.0, precision)


def rate_from(rate: float, precision: float) -> float:
    """The lowest rate of those that `highest` tries which is at least `rate`."""
    grid = math.log1p(precision)
    return math.exp(grid * math.ceil(math.log(max(LEAST, rate)) / grid - 1e-6))


def highest(at: Callable[[float], float], share: float, begin: float, precision: float) -> Best:
    """The highest rate, requests/s, at which `at` gives at least `share`, where that falls with the rate.

    Rates are powers of 1 + `precision`, so the answer does not depend on where the search begins: at `begin`, from
    which steps grow until the answer lies between two rates, and then halve.
    """
    grid = math.log1p(precision)
    least, most = (math.floor(math.log(rate) / grid) for rate in (LEAST, MOST))
    number = min(most, max(least, math.floor(math.log(begin) / grid + 1e-6)))
    low, high, reached = least - 1, most + 1, 0.0
    step, tried = 1, 0
    while high - low > 1:
        tried += 1
        found = at(math.exp(grid * number))
        if found >= share:
            low, reached = number, found
        else:
            high = number
        if low < least or high > most:  # one end is open: go on with longer steps
            number += step if low >= least else -step
            number = min(most, max(least, number))
            step *= 3
        else:
            number = (low + high) // 2
    rate = math.exp(grid * low) if low >= least else 0.0
    return Best(rate, reached, high <= most, tried)
