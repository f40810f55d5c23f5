"""A drafter whose acceptance is set: it knows what the target will say, and is wrong as often as it is told to be.

It costs nothing while the clock runs, so what a drafted step costs and gains can be measured apart from any drafter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import log
from random import Random
from typing import ClassVar

from torch import Tensor

from phasewise.errors import UserError
from phasewise.request.request import Request
from phasewise.step.phase import Hidden
from phasewise.step.span import Span
from phasewise.verbs.decode import Outcome
from phasewise.verbs.draft import Draft, Drafter, headroom
from phasewise.verbs.method import Method
from phasewise.verbs.traits import Traits

GOLDEN = 0.6180339887498949


@dataclass(frozen=True, slots=True)
class Script:
    """The guesses for one request: by the number of known tokens, the chain to guess then and how many of its first are
    right."""

    chains: dict[int, list[int]]
    right: dict[int, int]

    def forwards(self, prompt_len: int, limit: int) -> int:
        """Passes that a request of `limit` tokens takes after the one that gives its first token."""
        known, passes = prompt_len + 1, 0
        while known < limit:
            known += min(self.right[known], limit - known - 1) + 1
            passes += 1
        return passes


@dataclass(frozen=True)
class Scripted(Method, Drafter):
    """Chains of `k` guesses, each right with probability `accept` as long as those before it are. `tell` it of a
    request before the engine sees it; of others it guesses nothing.

    The passes of one request share their luck out evenly (u, u + golden ratio, ... modulo 1, not random numbers), so
    that even few of them give nearly the expected number of tokens.
    """

    k: int
    accept: float
    vocab: int
    scripts: dict[str, Script] = field(default_factory=dict, compare=False, repr=False)  # by request id

    paper: ClassVar[str] = ""
    guarantee: ClassVar[str] = "exact"
    needs: ClassVar[str] = "the target's own tokens"
    neutral: ClassVar[dict[str, object]] = {}
    traits: ClassVar[Traits] = Traits("draft")

    def __post_init__(self) -> None:
        if self.k < 1:
            raise UserError(f"scripted: k={self.k} must be at least 1")
        if not 0 <= self.accept <= 1:
            raise UserError(f"scripted: accept={self.accept:g} must lie in [0, 1]")
        if self.vocab < 2:
            raise UserError(f"scripted: vocab={self.vocab} leaves no token to be wrong with")

    def tell(self, request: Request, continuation: Sequence[int], seed: int | str) -> Script:
        """Sets what the target will say after the prompt of `request`. Guesses are drawn here, by `seed`."""
        rng, start = Random(f"scripted {seed}"), request.prompt_len
        right = [self._right(rng.random()) for _ in continuation]
        at, u = 1, rng.random()
        while at < len(right):  # where passes begin if no draft is cut
            right[at], u = self._right(u), (u + GOLDEN) % 1.0
            at += right[at] + 1
        chains = {}
        for at in range(1, len(right)):
            chains[start + at] = [
                token if i < right[at] else (token + 1) % self.vocab
                for i, token in enumerate(continuation[at : at + self.k])
            ]
        self.scripts[request.id] = script = Script(chains, {start + at: right[at] for at in range(1, len(right))})
        return script

    def _right(self, u: float) -> int:
        """The number of right guesses before the first wrong one, for u uniform in [0, 1)."""
        if self.accept in (0.0, 1.0):
            return self.k if self.accept else 0
        return min(self.k, int(log(1.0 - u) / log(self.accept)))

    def size(self, request: Request) -> int:
        return min(self.k, headroom(request))

    def draft(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Draft | None]:
        scripts = [self.scripts.get(request.id) for request in requests]
        return [
            Draft.chain(script.chains[request.known][:budget]) if script and request.known in script.chains else None
            for request, script, budget in zip(requests, scripts, budgets)
        ]

    def learn(
        self, spans: Sequence[Span], hidden: Hidden, outcomes: Sequence[Outcome], tops: Tensor | None = None
    ) -> None:
        pass


def expected(accept: float, k: int) -> float:
    """Tokens per pass of a chain of `k` guesses each right with probability `accept`: 1 + a + ... + a^k."""
    return sum(accept**i for i in range(k + 1))
