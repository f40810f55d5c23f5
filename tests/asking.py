"""Attend methods of tests that want to be asked in every layer."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from phasewise.step.plan import AttentionPlan, Custom
from phasewise.step.read import Read
from phasewise.step.span import Span
from phasewise.verbs.attend import Attend


class Asking(Attend):
    """Its `__call__` is asked for every span, layer by layer."""

    def plan(self, span: Span) -> AttentionPlan:
        return AttentionPlan(Custom(self))

    def __call__(self, reads: Sequence[Read]) -> Sequence[Tensor | None]:
        raise NotImplementedError
