"""Targets decide who goes first: whoever can still make it and has least time; what is lost moves on slowly. Ours.

Near to Niyama (arXiv 2503.22562): deadlines from targets, steps as large as the decodes' slack allows, and requests put
back once they cannot make it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from phasewise.errors import UserError
from phasewise.methods.schedule._latency import Latency
from phasewise.verbs.method import Method
from phasewise.verbs.schedule import RowBudget, Work
from phasewise.verbs.traits import Traits

AIM = 0.95  # of a TPOT target: steps are not as long as predicted to the millisecond
LOST = 16  # tokens that a decode may be behind its target before nobody waits for it any more
LEAST = 1.5  # prompts may always make a step this many times as long as its decodes alone


@dataclass(frozen=True)
class Slo(Method):
    """`sarathi` for requests with targets (`Request.slo`); without any target it is `sarathi` to the row.

    A prompt's slack is its deadline (arrival + TTFT target) minus now minus the time its rows still take, by a line
    a + b * rows fitted to the steps seen. A decode's next token is due when the mean since the first one keeps the TPOT
    target, so a fast start is slack to spend. Each step:

    - decodes run, but for those that would not be late if they missed a step: these lend their rows to the prompts;
    - prompts with slack left and lending decodes follow, the earliest deadline first. Prompts without a target or
      without slack come after them in order of arrival, but `share` of the rows beside the decodes is theirs in any
      case: the oldest of them moves on whenever any prompt does, and nobody starves;
    - a step has at most `budget` rows (or the decodes alone), and fewer where a decode would otherwise be late; but
      prompts may always lengthen it by half, and for a decode far behind its target nobody waits.

    Requests are admitted first come first served, whatever their targets. Left out: targets for whole answers.
    """

    budget: int = 512
    share: float = 0.25

    paper: ClassVar[str] = ""
    guarantee: ClassVar[str] = "exact"
    needs: ClassVar[str] = "nothing"
    neutral: ClassVar[dict[str, object]] = {"budget": 1 << 30}
    traits: ClassVar[Traits] = Traits("schedule")
    tight: ClassVar[dict[str, object]] = {"budget": 9}

    def __post_init__(self) -> None:
        if self.budget < 1:
            raise UserError(f"slo: budget={self.budget} must be at least 1")
        if not 0 < self.share <= 1:
            raise UserError(f"slo: share={self.share} must lie in (0, 1], so that nobody starves")

    def bind(self, host: object) -> _Slo:
        return _Slo(self.budget, self.share)


class _Slo:
    """Remembers how long steps take, and nothing of any request."""

    def __init__(self, budget: int, share: float) -> None:
        self.budget, self.share = budget, share
        self.latency = Latency()
        self._before: tuple[float, list[Work]] = 0.0, []  # the last plan, and when it was made

    def plan(self, live: Sequence[Any], now: float) -> list[Work]:
        self._learn(live, now)
        longest = self.latency(min(self.budget, sum(job.rows for job in live)))
        works: list[Work] = []
        hurried: list[tuple[float, int, Any]] = []  # deadline, order of arrival, job
        others: list[Any] = []
        for i, job in enumerate(live):
            due = _due(job)
            need = self._needs(job) if job.prefilling else 2 * longest  # a step without it, and one with it
            if due is not None and due - now >= need:
                hurried.append((due, i, job))
            elif job.prefilling:
                others.append(job)
            else:
                works.append(Work(job, job.rows))
        works += self._fill(self._room(live, works, now), [job for *_, job in sorted(hurried)], others)
        self._before = now, works
        return works

    def _learn(self, live: Sequence[Any], now: float) -> None:
        """The step planned last is over. If none of its jobs is here any more, the engine may have been idle since."""
        then, works = self._before
        here = {id(job) for job in live}
        if any(id(work.job) in here for work in works):
            self.latency.observe(sum(work.rows for work in works), now - then)

    def _needs(self, job: Any) -> float:
        """Seconds that the rest of a prompt takes if it has every step to itself."""
        return self.latency(job.rows, -(-job.rows // self.budget))

    def _room(self, live: Sequence[Any], works: Sequence[Work], now: float) -> int:
        """Rows that may come on top of these works."""
        used = sum(work.rows for work in works)
        free = self.budget - used
        fit = math.inf
        for job in live:
            due, pace = _due(job), job.slo.tpot
            if due is not None and pace is not None and not job.prefilling and now - due <= LOST * pace:
                fit = min(fit, self.latency.rows_in(max(due - now, pace / 2)))
        fit = max(fit, self.latency.rows_in(LEAST * self.latency(used)), used + 1)
        return max(0, math.floor(min(free, fit - used)))

    def _fill(self, room: int, hurried: Sequence[Any], others: Sequence[Any]) -> list[Work]:
        """`room` rows for these jobs, in their orders; what is set aside for the others and not used goes back."""
        aside = math.ceil(self.share * room)
        step = RowBudget(aside)
        for job in others:
            step.give(job, job.rows)
        step.left += room - aside
        for job in (*hurried, *others):
            step.give(job, job.rows)
        return step.works


def _due(job: Any) -> float | None:
    """When its next token has to be there, or None: the first by TTFT, later ones so that their mean keeps TPOT."""
    if job.first_token is None:
        return None if job.slo.ttft is None else float(job.arrived + job.slo.ttft)
    if job.slo.tpot is None:
        return None
    return float(job.first_token + (job.known - job.prompt_len) * AIM * job.slo.tpot)
