"""Whole prompts first, and no decode preempted more than four times: Splitwise's machines (arXiv 2311.18677)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from phasewise.errors import UserError
from phasewise.verbs.method import Method
from phasewise.verbs.schedule import Work
from phasewise.verbs.traits import Traits


@dataclass(frozen=True)
class SplitwiseMachine(Method):
    """What each of the paper's machines does with its queue; goes with `place=splitwise` and with any other placement.

    A prompt machine batches whole prompts, first come first served, up to `budget` rows a step. A token machine runs
    all its decodes. Where a machine has both, a step takes in this order, while rows are left of `budget`:

    - decodes that were preempted `preemptions` times: these always run;
    - prompts, of which the oldest always runs;
    - other decodes, those preempted more often first. Whoever finds no rows is preempted: it keeps its KV and waits.

    So no request is preempted more than `preemptions` times by one machine, and its priority grows with each time.
    Counts are a machine's own: a request that moves begins at none. Left out: the paper's limit of requests per step,
    which is the engine's `--max-running`.
    """

    budget: int = 2048
    preemptions: int = 4

    paper: ClassVar[str] = "arXiv 2311.18677"
    guarantee: ClassVar[str] = "exact"
    needs: ClassVar[str] = "nothing"
    neutral: ClassVar[dict[str, object]] = {}
    traits: ClassVar[Traits] = Traits("schedule", decodes_all=True)
    tight: ClassVar[dict[str, object]] = {"budget": 9, "preemptions": 2}

    def __post_init__(self) -> None:
        if self.budget < 1:
            raise UserError(f"splitwise: budget={self.budget} must be at least 1")
        if self.preemptions < 0:
            raise UserError(f"splitwise: preemptions={self.preemptions} must be at least 0")

    def bind(self, host: object) -> _Machine:
        return _Machine(self.budget, self.preemptions)


class _Machine:
    """Remembers how often it has preempted the decodes that are here."""

    def __init__(self, budget: int, preemptions: int) -> None:
        self.budget, self.preemptions = budget, preemptions
        self._preempted: dict[int, tuple[Any, int]] = {}  # by identity; the job is held, so that nobody else gets it

    def plan(self, live: Sequence[Any], now: float) -> list[Work]:
        prompts = [job for job in live if job.prefilling]
        if not prompts:
            return [Work(job, job.rows) for job in live]
        decodes = [(self._count(job), job) for job in live if not job.prefilling]
        works = [Work(job, job.rows) for count, job in decodes if count >= self.preemptions]
        left = self.budget - sum(work.rows for work in works)
        for place, job in enumerate(prompts):
            if place and job.rows > left:
                break
            works.append(Work(job, job.rows))
            left -= job.rows
        kept = {id(job): (job, count) for count, job in decodes if count}
        waiting = [(count, job) for count, job in decodes if count < self.preemptions]
        for count, job in sorted(waiting, key=lambda one: -one[0]):
            if job.rows <= left:
                works.append(Work(job, job.rows))
                left -= job.rows
            else:
                kept[id(job)] = job, count + 1
        self._preempted = kept
        return works

    def _count(self, job: Any) -> int:
        found = self._preempted.get(id(job))
        return found[1] if found is not None else 0
