"""Targets as slow-downs: how many times as long requests may take as with nobody else on one machine (the nine limits
of arXiv 2311.18677)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from phasewise.bench.latency import percentile
from phasewise.plan.cost import Cost, StepWork
from phasewise.plan.misses import Missed
from phasewise.plan.sequence import SimulatedRequest

QUANTILES = (0.5, 0.9, 0.99)
LIMITS = {"ttft": (2.0, 3.0, 6.0), "tpot": (1.25, 1.5, 5.0), "e2e": (1.25, 1.5, 5.0)}


@dataclass(frozen=True)
class Slowdowns:
    """Nine conditions, all of which must hold: limits for the time to the first token, the mean time per further token
    and the whole request, each at P50, P90 and P99 of all requests. `alone` is the cost of the uncontended machine's
    steps; a request's times there are those of its whole prompt and of decodes at its mean context."""

    alone: Cost
    limits: Mapping[str, tuple[float, ...]] = field(default_factory=lambda: LIMITS)

    def of(self, job: SimulatedRequest) -> dict[str, float]:
        """Returns how many times as long a finished request took; a single token has no time per further token."""
        n = job.prompt_len
        ttft = self.alone.seconds(StepWork(prefill_rows=n, pairs=n * (n + 1) / 2, prefixes=n, emits=1, ended=n))
        tpot = self.alone.seconds(StepWork(decode_rows=1, context=n + job.new // 2, emits=1))
        assert job.ttft is not None and job.last_token is not None
        found = {"ttft": job.ttft / ttft, "e2e": (job.last_token - job.arrived) / (ttft + tpot * (job.new - 1))}
        return found | ({} if job.tpot is None else {"tpot": job.tpot / tpot})

    def over(self, jobs: Sequence[SimulatedRequest]) -> float:
        """The condition that is kept worst: its slow-down over its limit, at most 1 where all hold. Infinite where a
        request did not finish."""
        if not all(job.finished for job in jobs):
            return math.inf
        every = [self.of(job) for job in jobs]
        worst = 0.0
        for name, limits in self.limits.items():
            values = [one[name] for one in every if name in one]
            for q, limit in zip(QUANTILES, limits, strict=True):
                worst = max(worst, (percentile(values, q) or 0.0) / limit)
        return worst


class SlowdownWatch:
    """Counts requests beyond each limit as they leave. Raises Missed once a quantile is sure to lie beyond its own,
    whatever becomes of the others, or once a request fails."""

    def __init__(self, slowdowns: Slowdowns, jobs: Sequence[SimulatedRequest]) -> None:
        self.slowdowns = slowdowns
        several = sum(job.new > 1 for job in jobs)
        self._spared = {  # so many of n values may lie beyond a limit before the quantile does
            (name, q): n - 1 - math.floor((n - 1) * q)
            for name, n in (("ttft", len(jobs)), ("tpot", several), ("e2e", len(jobs))) for q in QUANTILES
        }  # fmt: skip
        self._beyond: Counter[tuple[str, float]] = Counter()

    def arrived(self, job: SimulatedRequest, now: float) -> None:
        pass

    def left(self, job: SimulatedRequest, now: float) -> None:
        if not job.finished:
            raise Missed
        for name, value in self.slowdowns.of(job).items():
            for q, limit in zip(QUANTILES, self.slowdowns.limits[name], strict=True):
                if value > limit:
                    self._beyond[name, q] += 1
                    if self._beyond[name, q] > self._spared[name, q]:
                        raise Missed

    def over(self) -> None:
        pass
