"""Prompts before tokens: the policy of early continuous batching (vLLM's first scheduler, Orca's successor)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from phasewise.errors import UserError
from phasewise.verbs.method import Method
from phasewise.verbs.schedule import Work
from phasewise.verbs.traits import Traits


@dataclass(frozen=True)
class PrefillFirst(Method):
    """While a prompt waits, whole prompts run and decoding pauses; otherwise everybody decodes.

    Best TTFT, worst tail of TPOT: a long prompt stalls every stream. `budget` caps the prompt rows of one step; a
    single prompt longer than it still runs whole.
    """

    budget: int = 4096

    paper: ClassVar[str] = "arXiv 2309.06180"
    guarantee: ClassVar[str] = "exact"
    needs: ClassVar[str] = "nothing"
    neutral: ClassVar[dict[str, object]] = {}
    traits: ClassVar[Traits] = Traits("schedule", decodes_all=True)
    tight: ClassVar[dict[str, object]] = {"budget": 48}

    def __post_init__(self) -> None:
        if self.budget < 1:
            raise UserError(f"prefill_first: budget={self.budget} must be at least 1")

    def plan(self, live: Sequence[Any], now: float) -> list[Work]:
        prompts: list[Work] = []
        left = self.budget
        for job in live:
            if job.prefilling:
                if prompts and job.rows > left:
                    break
                prompts.append(Work(job, job.rows))
                left -= job.rows
        return prompts or [Work(job, job.rows) for job in live]
