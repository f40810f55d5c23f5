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
    """

    def rows(self, layer: int, span: Span, x: Tensor) -> Tensor | None:
        """Local rows of the span that run this layer (int64 index, possibly empty); None = all. x [R, d]."""
        ...

    def unused(self, layers: int) -> Sequence[int]:
        """Layers no row of this phase ever runs: their KV is freed when a request enters the phase."""
        ...
