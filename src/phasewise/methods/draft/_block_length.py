"""The number of masks in the next block of a request (DiffuSpec's controller, arXiv 2510.02358, section 4.3)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from phasewise.request.drawer import Drawer
from phasewise.request.request import Request


@dataclass(frozen=True)
class LengthRule:
    """Two moving averages begin at 0 and take `rho` of each new value: of tokens before an end token in the block's
    likeliest ones, and of accepted guesses. The next block has as many places as the first, rounded down; `delta` more
    where the second is as large. It has `least` to `most`, and the first block of a request has `most`."""

    least: int
    most: int
    delta: int
    rho: float

    @property
    def fixed(self) -> bool:
        return self.least == self.most


@dataclass(slots=True)
class LengthRecord(Drawer):
    """The averages of one request, the length of its next block, and what its last block generated."""

    length: int
    generated: float = 0.0
    accepted: float = 0.0
    last: int = 0

    def judged(self, rule: LengthRule, accepted: int) -> None:
        """Learns how many guesses of the last block were accepted."""
        self.generated += rule.rho * (self.last - self.generated)
        self.accepted += rule.rho * (accepted - self.accepted)
        grown = math.floor(self.generated) + rule.delta * (self.accepted >= self.generated)
        self.length = min(rule.most, max(rule.least, grown))


def length_record(request: Request, name: str, rule: LengthRule) -> LengthRecord:
    """The record of a request, which lies in its state under `name`; made where there is none."""
    found: LengthRecord | None = request.state.get(name)
    if found is None:
        found = request.state[name] = LengthRecord(rule.most)
    return found
