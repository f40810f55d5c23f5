"""attend: what may one query row read?"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING

from phasewise.verbs.slot import LayerRuntime

if TYPE_CHECKING:
    from phasewise.request.request import Request
    from phasewise.step.plan import AttentionPlan
    from phasewise.step.span import Span


class Attend(LayerRuntime, ABC):
    """attend: what may one query row read? What is cached stays as it is.

    Its traits say in which phases the method acts (`Traits.phases`); the verb's default acts in the others. Runtimes
    inherit from this class: what they leave out is as it is here.
    """

    everything: bool = False
    """True: its plans never choose. Rows read all that they see, with the scores that they have."""

    again: Callable[[Request, int], int] | None = None
    """(request, computed) -> how many of the last decoded rows are given up and computed once more, now that the rows
    below `computed` are there and before the new tokens are known. These rows come back as a replay does."""

    until: Callable[[Request], int | None] | None = None
    """(request) -> the position that no draft may reach, or None. Later state depends on the rows before it being
    committed: they are computed once more (`again`), or they choose."""

    @abstractmethod
    def plan(self, span: Span) -> AttentionPlan:
        """What the rows of a span may read in every layer (`step/plan.py`).

        It depends on the span and its request alone. Return one object for as long as the plan is the same: spans of
        one plan are read together, and what kernels need of it is prepared once.
        """
