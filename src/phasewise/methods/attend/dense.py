"""Every row reads everything it may see: exact attention, the reference of every other method."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from phasewise.step.plan import EVERYTHING, AttentionPlan
from phasewise.step.span import Span
from phasewise.verbs.attend import Attend
from phasewise.verbs.method import Method
from phasewise.verbs.traits import Traits


@dataclass(frozen=True)
class Dense(Method, Attend):
    """Exact attention over all visible rows."""

    paper: ClassVar[str] = ""
    guarantee: ClassVar[str] = "exact"
    needs: ClassVar[str] = "nothing"
    neutral: ClassVar[dict[str, object]] = {}
    everything = True
    traits: ClassVar[Traits] = Traits("attend")

    def plan(self, span: Span) -> AttentionPlan:
        return EVERYTHING
