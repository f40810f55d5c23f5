"""Prompts cross the model once, some layers per step, while decodes run whole (Layered Prefill, arXiv 2510.08055).

Token chunks make a mixture of experts read almost all of its experts once per chunk; layer groups read them once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from phasewise.errors import UserError
from phasewise.verbs.method import Method
from phasewise.verbs.schedule import Work
from phasewise.verbs.traits import Traits


@dataclass(frozen=True)
class Layered(Method):
    """One cohort of prompts is in flight at a time; each step runs every decode and the cohort's next layers.

    A cohort of T rows takes ceil(T / rows_per_group) steps, rounded up to a power of two and at most one per layer, so
    a step does about the work of `rows_per_group` rows through the whole model. Members are taken first come first
    served while they fit into rows_per_group rows per layer; a single longer prompt crosses in chunks of that size.
    All of this follows from `job.depth`, so a member that is cancelled or preempted simply drops out.

    Short prompts wait for the cohort ahead of them (the paper's price). Left out: the paper's tables of group counts
    per model, whose rule this is.
    """

    rows_per_group: int = 512

    paper: ClassVar[str] = "arXiv 2510.08055"
    guarantee: ClassVar[str] = "exact"
    needs: ClassVar[str] = "nothing"
    neutral: ClassVar[dict[str, object]] = {"rows_per_group": 1 << 30}
    traits: ClassVar[Traits] = Traits("schedule", decodes_all=True)
    tight: ClassVar[dict[str, object]] = {"rows_per_group": 16}

    def __post_init__(self) -> None:
        if self.rows_per_group < 1:
            raise UserError(f"layered: rows_per_group={self.rows_per_group} must be at least 1")

    def plan(self, live: Sequence[Any], now: float) -> list[Work]:
        works = [Work(job, job.rows) for job in live if not job.prefilling and not job.depth]
        cohort = [Work(job, job.rows) for job in live if job.depth] or self._cohort(live)
        groups = self._groups(sum(work.rows for work in cohort), cohort[0].job.layers) if cohort else 1
        for work in cohort:
            work.layers = _next_group(work.job.depth, work.job.layers, groups)
        return works + cohort

    def _cohort(self, live: Sequence[Any]) -> list[Work]:
        """The prompts that start together now."""
        cohort: list[Work] = []
        for job in live:
            if not job.prefilling:
                continue
            left = self.rows_per_group * job.layers - sum(work.rows for work in cohort)
            if cohort and job.rows > left:
                break
            cohort.append(Work(job, min(job.rows, left)))
        return cohort

    def _groups(self, rows: int, layers: int) -> int:
        """Steps that a cohort of `rows` rows takes."""
        wanted = -(-rows // self.rows_per_group)
        return min(1 << (wanted - 1).bit_length(), layers)


def _next_group(depth: int, layers: int, groups: int) -> tuple[int, int] | None:
    """The layers after the first `depth`, of `groups` groups of near-equal size; None = all at once."""
    if groups == 1 and depth == 0:
        return None
    return depth, next(end for end in (layers * g // groups for g in range(1, groups + 1)) if end > depth)
