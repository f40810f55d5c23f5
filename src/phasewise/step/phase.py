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
    """The result of a forward: `x` [T, d] after the last layer, and the taps asked for, {layer: [T, d]}.

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
    adapted: bool = True  # its rows run with the adapter of their request, as those of a second model do not
    taps: frozenset[int] = frozenset()  # layers whose output its decode method wants to see (`Hidden.taps`)

    # ---- what rows read
    def plan(self, span: Span) -> AttentionPlan:
        """The attention plan of a span, which its attend and evict methods make together."""
        plan, evict = self.attend.plan(span), self.evict
        if evict is None or id(evict) == id(self.attend):  # one runtime may fill both slots
            return plan
        return merge(plan, evict.plan(span))

    @cached_property
    def dense(self) -> bool:
        """True if no plan of the attend method ever chooses: rows read all that they see."""
        return self.attend.everything

    # ---- which layers run, and with which weights
    @cached_property
    def delta(self) -> Delta | None:
        """Low-rank weights that a method of this phase brings for its rows."""
        acting = (method.delta for method in (self.skip, self.attend, self.evict) if method is not None)
        return next((delta for delta in acting if delta is not None), None)

    @cached_property
    def late(self) -> Callable[[int, Span], Late | None] | None:
        """`Skip.late` of its skip method."""
        return None if self.skip is None else self.skip.late

    @cached_property
    def ran(self) -> Callable[[int, Span, Tensor], None] | None:
        """`Skip.ran` of its skip method."""
        return None if self.skip is None else self.skip.ran

    # ---- what follows a commit
    @cached_property
    def _told(self) -> tuple[Callable[[Span, int | Sequence[int]], None], ...]:
        acting = [method.stayed for method in (self.attend, self.evict, self.skip) if method is not None]
        return tuple(told for told in dict.fromkeys(acting) if told is not None)

    def tell(self, span: Span, keep: int | Sequence[int]) -> None:
        """Tell methods which rows of a span have been committed: the first so many, or a path."""
        for told in self._told:
            told(span, keep)

    def until(self, request: Request) -> int | None:
        """The position that no draft of a request may reach; None: the attend method sets no bound."""
        return None if self.attend.until is None else self.attend.until(request)

    def back(self, span: Span, outcome: Outcome) -> int:
        """The number of a request's last rows to compute once more, now that what is kept of `span` is there."""
        again = self.attend.again
        return outcome.again if again is None else max(outcome.again, again(span.request, span.request.computed))

    def marks(self, request: Request) -> Callable[[int, int, int], Tensor] | None:
        """`Evict.saliency` of a request, (layer, start, stop) -> float32 [stop - start]; None: no rows are ranked."""
        if self.evict is None or self.evict.saliency is None:
            return None
        return partial(self.evict.saliency, request)
