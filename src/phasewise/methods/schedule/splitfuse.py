"""Dynamic SplitFuse: every step has exactly the budget's rows as long as there is work for them (arXiv 2401.08671).

A forward's speed grows with its rows ever more slowly, so equal steps get most tokens through: long prompts are split,
short ones and the head of the next are fused in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from phasewise.errors import UserError
from phasewise.verbs.method import Method
from phasewise.verbs.schedule import RowBudget, Work
from phasewise.verbs.traits import Traits


@dataclass(frozen=True)
class SplitFuse(Method):
    """One row for every decode, then prompts first come first served, then guesses, until `budget` rows are reached.

    A mix of prompts and fewer plain decodes than rows comes out as with `sarathi`, which fills its steps as well. But
    `sarathi`'s budget only says when to add no more prompts, and here it is the size of the step:

    - guesses (drafts, blocks of masks) take only rows that no prompt wants; `sarathi` lets decodes bring them first;
    - of more decodes than rows, those run whose last token is oldest; `sarathi` runs all of them, in a larger step;
    - known tokens that are recomputed after a preemption wait in line with the prompts, after one row.

    What has a smallest unit still brings a whole one: a block, and a draft on whose size tokens depend. Left out:
    padding to a fixed shape for captured graphs, and planning the next step while this one runs. Preemption is the
    engine's.
    """

    budget: int = 512

    paper: ClassVar[str] = "arXiv 2401.08671"
    guarantee: ClassVar[str] = "exact"
    needs: ClassVar[str] = "nothing"
    neutral: ClassVar[dict[str, object]] = {"budget": 1 << 30}
    traits: ClassVar[Traits] = Traits("schedule")
    tight: ClassVar[dict[str, object]] = {"budget": 3}

    def __post_init__(self) -> None:
        if self.budget < 1:
            raise UserError(f"splitfuse: budget={self.budget} must be at least 1")

    def plan(self, live: Sequence[Any], now: float) -> list[Work]:
        decodes = sorted((job for job in live if not job.prefilling), key=_latest)
        step = RowBudget(self.budget)
        for job in decodes:
            step.give(job, 1)
        for job in live:
            step.give(job, job.rows if job.prefilling else job.known - job.computed)
        for job in decodes:
            step.give(job, job.rows)
        return step.works


def _latest(job: Any) -> float:
    """When it last got a token, or came."""
    return float(job.arrived if job.last_token is None else job.last_token)
