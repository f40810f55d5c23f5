"""A phase as a value, and what a pass through the model leaves behind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from phasewise.model.lowrank import Delta
    from phasewise.ops.native.weighed import Weighs
    from phasewise.request.request import Request
    from phasewise.step.bias import FirstBias
    from phasewise.step.choice import Choice
    from phasewise.step.late import Late
    from phasewise.step.sight import Sight
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


@dataclass(frozen=True, slots=True)
class Phase:
    """One stretch of a generation, as a value: a bound method per verb. None = the plain way, at no cost."""

    name: str
    decode: Decode
    attend: Attend
    evict: Evict | None = None
    skip: Skip | None = None
    holds: Callable[[Request], bool] | None = None  # whether a request is in it; None = all that are in none before it
    delta: Delta | None = field(init=False)  # low-rank weights that the rows of this phase, and no others, run with
    walk: tuple[int, ...] | None = field(init=False)  # the layers that its rows run, where that is known; None = all
    walks: bool = field(init=False)  # rows run `walk`: who acts does so within attention
    sight: Sight | None = field(init=False)  # what they see, where the evict method says that as data
    choice: Choice | None = field(init=False)  # how they choose what they read, where `attend` says that as data
    bias: FirstBias | None = field(init=False)  # what they add to scores of position 0, likewise
    told: tuple[Callable[[Span, int | Sequence[int]], None], ...] = field(init=False)  # see `tell`
    again: Callable[[Request, int], int] | None = field(init=False)  # as the attend method says: verbs/attend.py
    until: Callable[[Request], int | None] | None = field(init=False)  # likewise
    whole: bool = field(init=False)  # prompts come in one piece, whatever a scheduler gives
    weighs: Callable[[Span], Weighs | None] | None = field(init=False)  # as the evict method says: verbs/evict.py
    late: Callable[[int, Span], Late | None] | None = field(init=False)  # as the skip method says: verbs/skip.py
    ran: Callable[[int, Span, Tensor], None] | None = field(init=False)  # likewise
    plain: bool = field(
        init=False
    )  # and they read all before them, or what `sight` says of all heads, unseen by others

    def __post_init__(self) -> None:
        dense = getattr(self.attend, "everything", False)
        deltas = (getattr(method, "delta", None) for method in (self.skip, self.attend, self.evict))
        object.__setattr__(self, "delta", next((delta for delta in deltas if delta is not None), None))
        object.__setattr__(self, "walk", getattr(self.skip, "walk", None))
        object.__setattr__(self, "walks", self.skip is None or self.walk is not None)
        object.__setattr__(self, "sight", getattr(self.evict, "sight", None))
        object.__setattr__(self, "choice", getattr(self.attend, "choice", None))
        object.__setattr__(self, "bias", getattr(self.attend, "bias", None))
        told = dict.fromkeys(getattr(method, "stayed", None) for method in (self.attend, self.evict))
        object.__setattr__(self, "told", tuple(each for each in told if each is not None))
        object.__setattr__(self, "again", getattr(self.attend, "again", None))
        object.__setattr__(self, "until", getattr(self.attend, "until", None))
        slots = (self.attend, self.evict, self.skip)
        object.__setattr__(self, "whole", any(getattr(method, "whole", False) for method in slots))
        object.__setattr__(self, "weighs", getattr(self.evict, "weighs", None) if dense and self.skip is None else None)
        object.__setattr__(self, "late", getattr(self.skip, "late", None))
        object.__setattr__(self, "ran", getattr(self.skip, "ran", None))
        object.__setattr__(self, "plain", self.walks and (self.evict is None or self._alike) and dense)

    def back(self, span: Span, outcome: Outcome) -> int:
        """How many of a request's last rows are to be computed once more, now that what is kept of `span` is there."""
        say = self.again
        return outcome.again if say is None else max(outcome.again, say(span.request, span.request.computed))

    def looks(self, span: Span) -> bool:
        """Whether a method acts between the queries and the attention of this span's rows in some layer."""
        return not self.plain and (self.watches(span) or not self.reads_all(span))

    def reads_all(self, span: Span) -> bool:
        """Whether its rows read all that they see."""
        return getattr(self.attend, "everything", False) or not _looks(self.attend, span)

    def tell(self, span: Span, keep: int | Sequence[int]) -> None:
        """Tell methods which rows of a span have been committed: the first so many, or a path."""
        for told in self.told:
            told(span, keep)

    def marks(self, request: Request) -> Callable[[int, int, int], Tensor] | None:
        """How much committed rows of a request matter, (layer, start, stop), where the evict method can say it."""
        say = getattr(self.evict, "saliency", None)
        return None if say is None else partial(say, request)

    def watches(self, span: Span) -> bool:
        """Whether the evict method acts there."""
        return self.evict is not None and not self._alike and _looks(self.evict, span)

    @property
    def _alike(self) -> bool:
        """Whether the evict method says what rows see as data, for all heads alike."""
        return self.sight is not None and self.sight.heads is None


def _looks(method: Attend | Evict, span: Span) -> bool:
    say = getattr(method, "looks", None)
    return True if say is None else bool(say(span))
