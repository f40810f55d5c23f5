"""Which native calls a run makes."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from phasewise.ops.native.stack import Halves


@dataclass
class Pass:
    """One pass of rows through a stack: all its layers in one call, or in halves of them."""

    rows: int
    layers: int
    stops: list[int] = field(default_factory=list)  # after these halves

    @property
    def whole(self) -> bool:
        return self.stops == [2 * self.layers]


def passes(patch: pytest.MonkeyPatch) -> list[Pass]:
    """Grows with every native pass while `patch` holds."""
    made: list[Pass] = []
    current: dict[int, Pass] = {}
    upto = Halves.upto

    def watched(self: Halves, half: int) -> None:
        if id(self) not in current or self._at == 0:
            current[id(self)] = Pass(self.x.shape[0], self._stack.count)
            made.append(current[id(self)])
        if half != self._at:
            current[id(self)].stops.append(half)
        upto(self, half)

    patch.setattr(Halves, "upto", watched)
    return made
