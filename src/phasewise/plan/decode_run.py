"""Steps in which the same requests decode one row each: counted together, and written into the requests at the end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heappush

from phasewise.plan.cost import StepWork
from phasewise.plan.sequence import SimulatedSequence


class DecodeRun:
    """A run of equal steps of one engine. A step of it costs the simulator the same however many requests it has.

    It ends before the step that brings a request's last token. KV grows in the same step and order as without it.
    """

    __slots__ = ("_full", "_jobs", "_left", "_over", "_room", "_times", "context", "steps")

    def __init__(self, jobs: Sequence[SimulatedSequence], room: Callable[[int], bool]) -> None:
        """`room` tells whether the ledger has so many bytes. Raises ValueError for requests that bring other rows."""
        self._jobs, self._room = list(jobs), room
        self.steps, self._over = 0, 0.0  # that are over and not written yet, and when the last one was
        self._left = min((job.limit - job.known for job in jobs), default=0) - 1
        self._times: list[float] | None = [] if any(job.stamps.tokens is not None for job in jobs) else None
        self._full: list[tuple[int, int]] = []  # after so many steps, the room of this request is used up
        self.context = 0  # rows of KV that the next step reads
        for place, job in enumerate(jobs):
            if job.kv is None or job.rows != 1 or job.computed + 1 != job.known or job.computed < job.high_water:
                raise ValueError(f"request {job.id} does more than decode one row")
            self.context += job.known
            self._full.append((job.kv.spare, place))
        heapify(self._full)

    def begin(self) -> StepWork | None:
        """Returns the next step, or None where the run is over: a request is about to end, or finds no room."""
        if self._left <= 0:
            return None
        while self._full[0][0] <= self.steps:
            place = self._full[0][1]
            kv = self._jobs[place].kv
            assert kv is not None
            kv.spare -= self.steps
            if not self._room(kv.growth(1)):
                kv.spare += self.steps
                return None
            kv.reserve(1)
            kv.spare += self.steps
            heappop(self._full)
            heappush(self._full, (kv.spare, place))
        n = len(self._jobs)
        return StepWork(decode_rows=n, context=self.context, emits=n)

    def finish(self, now: float) -> int:
        """A step is over. Returns how many tokens it brought."""
        n = len(self._jobs)
        self.steps += 1
        self._left -= 1
        self._over = now
        self.context += n
        if self._times is not None:
            self._times.append(now)
        return n

    def write(self) -> None:
        """Bring the requests up to date. The run must not be used afterwards."""
        steps = self.steps
        if not steps:
            return
        for job in self._jobs:
            job.known += steps
            job.computed = job.high_water = job.known - 1
            job.kv.spare -= steps  # type: ignore[union-attr]
            job.gained, job.last_token = 1, self._over
            if job.stamps.tokens is not None and self._times is not None:
                job.stamps.tokens.extend(self._times)
