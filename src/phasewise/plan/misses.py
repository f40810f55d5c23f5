"""Tells whether a share of requests meets its targets, as early as it is sure, so that no rate is simulated whole."""

from __future__ import annotations

from collections import deque
from heapq import heappop, heappush
from typing import cast

from phasewise.plan.sequence import SimulatedRequest
from phasewise.request.params import SLO


class Missed(Exception):
    """Too many requests have missed their targets for the share that is asked for, whatever becomes of the others."""


class Met(Exception):
    """The share is reached, whatever becomes of the others."""


class MissWatch:
    """Counts requests that are certain to miss their targets, as soon as that is known: their first token is late,
    what they still lack cannot come in time any more, or they have left too late. Raises Missed once a share of `of`
    requests can no longer be reached; with `early`, Met once it is."""

    def __init__(self, slo: SLO, share: float, of: int, early: bool = False) -> None:
        self.slo, self.share, self.of, self.early = slo, share, of, early
        self.missed = self.met = 0
        self._late: set[str] = set()
        self._first: deque[SimulatedRequest] = deque()  # whose first token may be late, by arrival
        self._last: list[tuple[float, int, SimulatedRequest]] = []  # by when they have to be done

    def arrived(self, job: SimulatedRequest, now: float) -> None:
        if self.slo.ttft is not None:
            self._first.append(job)
        self.look(now)

    def left(self, job: SimulatedRequest, now: float) -> None:
        if not job.meets(self.slo):
            self._miss(job)
        else:
            self.met += 1
            if self.early and self.met / self.of >= self.share:
                raise Met
        self.look(now)

    def look(self, now: float) -> None:
        """Nothing comes before `now` that has not come yet."""
        slo, first, last = self.slo, self._first, self._last
        while first and first[0].arrived + cast(float, slo.ttft) < now:
            job = first.popleft()
            if job.first_token is None:
                self._miss(job)
            elif slo.tpot is not None and job.left is None:
                heappush(last, (job.first_token + slo.tpot * (job.new - 1), id(job), job))
        while last and last[0][0] < now:
            job = heappop(last)[2]
            if job.left is None:
                self._miss(job)

    def over(self) -> None:
        """A cluster has come to its end; another one begins at its own beginning."""
        self._first.clear()
        self._last.clear()

    def _miss(self, job: SimulatedRequest) -> None:
        if job.id not in self._late:
            self._late.add(job.id)
            self.missed += 1
            if (self.of - self.missed) / self.of < self.share:
                raise Missed
