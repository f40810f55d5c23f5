"""Requests as numbers: when they come, how long they are, and which tokens they share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from phasewise.bench.blocks import SharedBlocks, prompts_of
from phasewise.bench.workloads import Lengths, shares, timed
from phasewise.errors import UserError
from phasewise.plan.sequence import SimulatedRequest
from phasewise.request.params import SLO

APART = 1 << 20  # token ids of one request lie so far from those of the next


@dataclass(frozen=True)
class Load:
    """`requests` of a workload; `rate` and `cv` as `timed` takes them. Longer ones than `context` are cut to it."""

    lengths: Lengths
    requests: int
    rate: float | None = None
    cv: float = 1.0
    seed: int = 0
    context: int = 1 << 30

    @property
    def shares(self) -> bool:
        """True if its prompts have something in common."""
        return shares(self.lengths)

    def jobs(self, slo: SLO, rate: float | None = None) -> list[SimulatedRequest]:
        """All of them, at a rate of their own if one is given. Raises UserError."""
        if self.requests < 1:
            raise UserError(f"requests={self.requests}: a load has at least one")
        shared = self.lengths.prefix
        found = []
        every = timed(self.lengths, self.requests, rate=rate or self.rate, seed=self.seed, cv=self.cv)
        blocks = self._blocks()
        for i, (arrival, length, new) in enumerate(every):
            new = min(new, max(1, self.context // 2), self.context - 1)
            if blocks is not None:
                tokens: Sequence[int] = blocks[i][: self.context - new]
            else:
                tokens = _tokens(i, shared, min(shared + length, self.context - new))
            found.append(SimulatedRequest(f"r{i}", tokens, new, arrival, slo))
        return found

    def _blocks(self) -> list[list[int]] | None:
        """The prompts of a workload that says which blocks they share: each block has ids of its own."""
        shape = self.lengths
        if not isinstance(shape, SharedBlocks):
            return None
        each = shape.tokens_each
        return prompts_of(shape, self.requests, lambda id: range(APART * (id + 1), APART * (id + 1) + each))


def _tokens(number: int, shared: int, length: int) -> Sequence[int]:
    """Ids that nobody else has, but for the first `shared`, which all have."""
    own = range(APART * (number + 1), APART * (number + 1) + length - min(shared, length))
    return [*range(min(shared, length)), *own] if shared else own
