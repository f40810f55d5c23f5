"""skip: which layers run for a row?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

if TYPE_CHECKING:
    from phasewise.step.span import Span


class Skip(Protocol):
    """skip: which layers run for a row?

    Its dataclass says in `phases` in which phases it acts, as that of an attend method does. The verb's default binds
    to None, which is asked nothing.

    Optional:
        walk: tuple  -- the layers that all rows of its phases run, increasing, where they are known beforehand: such
            steps are native, unless there is a delta
        delta: Delta  -- low-rank weights (model/lowrank.py) that the rows of its phases, and no others, run with
        whole: bool  -- as of an evict method: prompts come in one piece
        late(layer: int, span: Span) -> Late | None  -- asked before `rows`: tokens known before that have not run this
            layer and run it now, beside the only row of the span. Each sees what this layer holds of positions up to
            its own. They stay if that row stays. With such a method tokens are computed one at a time after the prompt,
            replays too, and decode methods that bring more (no `singly`) are refused, as are requests that ask about
            rows of the prompt other than its last
        ran(layer: int, span: Span, x: Tensor) -> None  -- beside `late`: what the layer has made of them, [r, d]
    """

    def rows(self, layer: int, span: Span, x: Tensor) -> Tensor | None:
        """Local rows of the span that run this layer (int64 index, possibly empty); None = all. x [R, d]."""
        ...

    def unused(self, layers: int) -> Sequence[int]:
        """Layers no row of this phase ever runs: their KV is freed when a request enters the phase."""
        ...
