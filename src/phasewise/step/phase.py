"""A phase as a value, and what a pass through the model leaves behind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from phasewise.step.plan import AttentionPlan, merge

if TYPE_CHECKING:
    from phasewise.model.lowrank import Delta
    from phasewise.request.request import Request
    from phasewise.step.late import Late
    from phasewise.step.span import Span
    from phasewise.verbs.attend import Attend
    from phasewise.verbs.decode import Decode, Outcome
    from phasewise.verbs.evict import Evict
    from phasewise.verbs.skip import Skip


@dataclass(slots=True)
class Hidden:
    """What a forward leaves behind: `x` [T, d] after the last layer, and the taps asked for, {layer: [T, d]}.

    Whoever needs them beyond the step copies them: the next one may write over them.
    """

    x: Tensor
    count: int  # T, which is slow to ask of a tensor
    taps: dict[int, Tensor] = field(default_factory=dict)

    def rows(self, index: list[int]) -> Tensor:
        """Rows of `x` -> [n, d]; not a copy if they are all of them in order."""
        if len(index) == self.count and (self.count == 1 or index == list(range(self.count))):
            return self.x
        return self.x[torch.tensor(index, device=self.x.device)]


@dataclass(frozen=True)
class Phase:
    """One stretch of a generation, as a value: a bound method per verb. None = the plain way, at no cost."""

    name: str
    decode: Decode
    attend: Attend
    evict: Evict | None = None
    skip: Skip | None = None
    holds: Callable[[Request], bool] | None = None  # whether a request is in it; None = all that are in none before it
    whole: bool = False  # prompts come in one piece, whatever a scheduler gives (`Traits.whole_prompts`)

    # ---- what rows read
    def plan(self, span: Span) -> AttentionPlan:
        """What the rows of a span may read, as its attend and evict methods say together."""
        plan = self.attend.plan(span)
        if self.evict is None or self.evict is self.attend:
            return plan
        return merge(plan, self.evict.plan(span))

    @cached_property
    def dense(self) -> bool:
        """Whether no plan of the attend method ever chooses: rows read all that they see."""
        return getattr(self.attend, "everything", False)

    # ---- which layers run, and with which weights
    @cached_property
    def delta(self) -> Delta | None:
        """Low-rank weights that the rows of this phase, and no others, run with."""
        found = (getattr(method, "delta", None) for method in (self.skip, self.attend, self.evict))
        return next((delta for delta in found if delta is not None), None)

    @cached_property
    def walk(self) -> tuple[int, ...] | None:
        """The layers that its rows run, where that is known beforehand; None = all."""
        return getattr(self.skip, "walk", None)

    @cached_property
    def walks(self) -> bool:
        """Whether all rows run the layers of `walk`."""
        return self.skip is None or self.walk is not None

    @cached_property
    def late(self) -> Callable[[int, Span], Late | None] | None:
        """As the skip method says: verbs/skip.py."""
        return getattr(self.skip, "late", None)

    @cached_property
    def ran(self) -> Callable[[int, Span, Tensor], None] | None:
        """Likewise."""
        return getattr(self.skip, "ran", None)

    # ---- what follows a commit
    @cached_property
    def again(self) -> Callable[[Request, int], int] | None:
        """As the attend method says: verbs/attend.py."""
        return getattr(self.attend, "again", None)

    @cached_property
    def until(self) -> Callable[[Request], int | None] | None:
        """Likewise."""
        return getattr(self.attend, "until", None)

    @cached_property
    def _told(self) -> tuple[Callable[[Span, int | Sequence[int]], None], ...]:
        told = dict.fromkeys(getattr(method, "stayed", None) for method in (self.attend, self.evict))
        return tuple(each for each in told if each is not None)

    def tell(self, span: Span, keep: int | Sequence[int]) -> None:
        """Tell methods which rows of a span have been committed: the first so many, or a path."""
        for told in self._told:
            told(span, keep)

    def back(self, span: Span, outcome: Outcome) -> int:
        """How many of a request's last rows are to be computed once more, now that what is kept of `span` is there."""
        say = self.again
        return outcome.again if say is None else max(outcome.again, say(span.request, span.request.computed))

    def marks(self, request: Request) -> Callable[[int, int, int], Tensor] | None:
        """How much committed rows of a request matter, (layer, start, stop), where the evict method can say it."""
        say = getattr(self.evict, "saliency", None)
        return None if say is None else partial(say, request)
