"""Schedulers are numbers only: jobs without a model, a loop that runs a policy over them, and a clock of our own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from phasewise.request.params import SLO
from phasewise.verbs.schedule import Scheduler


@dataclass(eq=False)
class Job:
    """A stand-in for a request: `prompt_len` rows of prompt, then `new` tokens one at a time.

    It comes with step `arrives`, and not before the clock shows `arrived`. A decode step may bring `guesses` more rows,
    of which none is ever right. After a preemption, `computed` is 0 and what is known is computed again.
    """

    name: str
    prompt_len: int
    new: int = 4
    layers: int = 16
    arrives: int = 0  # step
    arrived: float = 0.0
    computed: int = 0
    depth: int = 0
    slo: SLO = field(default_factory=SLO)
    out: int = 0
    guesses: int = 0
    slice: int = 0  # rows of the slice under way
    stamps: list[float] = field(default_factory=list)  # time of each token

    @property
    def prefilling(self) -> bool:
        return self.computed < self.prompt_len

    @property
    def rows(self) -> int:
        if self.depth:
            return self.slice
        return (self.prompt_len if self.prefilling else self.known + self.guesses) - self.computed

    @property
    def known(self) -> int:
        return self.prompt_len + self.out

    @property
    def first_token(self) -> float | None:
        return self.stamps[0] if self.stamps else None

    @property
    def last_token(self) -> float | None:
        return self.stamps[-1] if self.stamps else None

    @property
    def done(self) -> bool:
        return self.out >= self.new

    def advance(self, rows: int, layers: tuple[int, int] | None, now: float) -> None:
        first, end = layers or (0, self.layers)
        assert first == self.depth and first < end <= self.layers
        assert not self.depth or rows == self.slice, "a slice under way goes on with the same rows"
        if end < self.layers:
            self.depth, self.slice = end, rows
            return
        self.depth = 0
        self.computed = min(self.computed + rows, self.known)
        if self.computed == self.known:
            self.out += 1
            self.stamps.append(now)


def bound(policy: Any) -> Scheduler:
    """A scheduler as one engine has it."""
    return policy.bind(None) if hasattr(policy, "bind") else policy


Step = dict[str, tuple[int, tuple[int, int] | None]]  # what each job brought: rows, and layers if not all


def decoding(name: str, new: int = 99, layers: int = 16) -> Job:
    """A job whose prompt is behind it."""
    return Job(name, 1, new, layers, computed=1, out=1)


def simulate(
    policy: Scheduler,
    jobs: Sequence[Job],
    *,
    steps: int = 10_000,
    cost: Callable[[int], float] = lambda rows: 1.0,
    watch: Callable[[list[Job], Step], None] | None = None,
) -> list[Step]:
    """Run until all jobs are done, or for `steps` steps. A step of n rows lasts `cost(n)`; `watch` sees each plan."""
    policy = bound(policy)
    history: list[Step] = []
    now = 0.0
    while not all(job.done for job in jobs) and len(history) < steps:
        live = [job for job in jobs if job.arrives <= len(history) and job.arrived <= now and not job.done]
        works = policy.plan(live, now)
        assert len({id(work.job) for work in works}) == len(works), "a job is planned twice"
        assert all(0 < work.rows <= work.job.rows for work in works)
        assert works or not live, "a plan of nothing"
        step: Step = {work.job.name: (work.rows, work.layers) for work in works}
        if watch is not None:
            watch(live, step)
        if not live:
            now = min((job.arrived for job in jobs if job.arrived > now), default=now)
        now += cost(sum(work.rows for work in works))
        for work in works:
            work.job.advance(work.rows, work.layers, now)
        history.append(step)
    return history


def rows(step: Step) -> dict[str, int]:
    return {name: n for name, (n, _) in step.items()}
