"""attend: what may one query row read?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

if TYPE_CHECKING:
    from phasewise.step.read import Read


class Attend(Protocol):
    """attend: what may one query row read? Pages stay untouched.

    A method that always reads exactly everything visible may say so in an attribute `everything = True`; whole steps
    may then run without it. If it also has `commons(spans) -> Sequence[Common]`, these read what it lists once for all.
    """

    def __call__(self, reads: Sequence[Read]) -> list[Tensor]:
        """One output [R, hq, D] per read; a row's result depends on that row and its committed prefix alone."""
        ...
