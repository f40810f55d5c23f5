"""skip: which layers run for a row?"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from phasewise.verbs.slot import LayerRuntime

if TYPE_CHECKING:
    from phasewise.step.late import Late
    from phasewise.step.span import Span


class Skip(LayerRuntime, ABC):
    """skip: which layers run for a row?

    Its traits say in which phases the method acts (`Traits.phases`). The verb's default binds to None, which is asked
    nothing. Runtimes inherit from this class: what they leave out is as it is here.
    """

    walk: tuple[int, ...] | None = None
    """The layers that all rows of its phases run, increasing; None: rows differ."""

    late: Callable[[int, Span], Late | None] | None = None
    """(layer, span) -> tokens known before that have not run this layer and run it now, beside the only row of the
    span; asked before `rows`. Each sees what this layer holds of positions up to its own. They stay if that row stays.
    With such a method tokens are computed one at a time after the prompt, replays too. Decode methods that bring more
    rows at once (`Traits.single_rows` is false) are refused, and so are requests that ask about rows of the prompt
    other than its last."""

    ran: Callable[[int, Span, Tensor], None] | None = None
    """(layer, span, x [r, d]) is told, beside `late`, what the layer has made of these tokens."""

    def walk_of(self, span: Span) -> tuple[int, ...] | None:
        """The layers that all rows of a span run, increasing, where they are known beforehand; None: they are not, or
        rows differ. Spans whose layers are known take native steps. The answer agrees with `rows`."""
        return self.walk

    @abstractmethod
    def rows(self, layer: int, span: Span, x: Tensor) -> Tensor | None:
        """Local rows of the span that run this layer (int64 index, possibly empty); None = all. x [R, d]."""

    def unused(self, layers: int) -> Sequence[int]:
        """Layers no row of this phase ever runs: their KV is freed when a request enters the phase."""
        return ()
