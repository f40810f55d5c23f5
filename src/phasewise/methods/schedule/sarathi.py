"""Stall-free batching: decodes first, then prompt chunks up to a token budget (Sarathi-Serve, arXiv 2403.02310)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from phasewise.errors import UserError
from phasewise.verbs.method import Method
from phasewise.verbs.schedule import RowBudget, Work
from phasewise.verbs.traits import Traits


@dataclass(frozen=True)
class Sarathi(Method):
    """No decode ever waits for a prompt. No step has more than `budget` rows, or than its decodes and `reserve`
    together where these are more.

    Decodes eat the budget and prompts get the rest of it; `reserve` rows a step are for prompts whatever the decodes
    take, so that prompts cannot starve. The paper admits a request only when some budget is left for it; here the
    engine admits as soon as its whole prompt has KV, and a prompt without budget waits with its KV in hand. Left out:
    chunk sizes that fall with a prompt's progress, and a budget chosen by a profiling run.
    """

    budget: int = 512
    reserve: int = 0

    paper: ClassVar[str] = "arXiv 2403.02310"
    guarantee: ClassVar[str] = "exact"
    needs: ClassVar[str] = "nothing"
    neutral: ClassVar[dict[str, object]] = {"budget": 1 << 30}
    traits: ClassVar[Traits] = Traits("schedule", decodes_all=True)
    tight: ClassVar[dict[str, object]] = {"budget": 9}

    def __post_init__(self) -> None:
        if self.budget < 1:
            raise UserError(f"sarathi: budget={self.budget} must be at least 1")
        if not 0 <= self.reserve <= self.budget:
            raise UserError(f"sarathi: reserve={self.reserve} must lie in [0, budget={self.budget}]")

    def plan(self, live: Sequence[Any], now: float) -> list[Work]:
        works: list[Work] = []
        prompts: list[Any] = []
        left = self.budget
        for job in live:
            if job.prefilling:
                prompts.append(job)
            else:
                works.append(Work(job, job.rows))
                left -= job.rows
        if prompts:
            step = RowBudget(max(left, self.reserve))
            for job in prompts:
                step.give(job, job.rows)
            works += step.works
        return works
