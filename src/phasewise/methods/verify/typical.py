"""Accept what the model would not find unusual (the typical acceptance of Medusa, arXiv 2401.10774): lossy where tokens
are drawn."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from phasewise.errors import UserError
from phasewise.methods.verify.match import Match
from phasewise.verbs.draft import Draft
from phasewise.verbs.method import Method
from phasewise.verbs.sample import Dist, Purpose
from phasewise.verbs.traits import Traits
from phasewise.verbs.verify import Random

MATCH = Match()


@dataclass(frozen=True)
class Typical(Method):
    """A guess x of a sampled request is accepted if p(x) > min(`epsilon`, `delta` exp(-H(p))): p is the distribution
    that the request draws from there, and H its entropy in nats. Of several accepted paths the longest is taken, of
    equally long ones the likeliest.

    Behind the path a token is drawn from p. Where a guess carries it, that is accepted too, and the rule goes on from
    there; so text comes no slower than under `match`. With `epsilon=1` and a `delta` beyond the size of the vocabulary
    the rule accepts no guess, and this is `match` itself. A greedy request's p has one token, which alone exceeds the
    threshold: its answers are exact. The paper has delta = sqrt(epsilon).
    """

    epsilon: float = 0.09
    delta: float = 0.3

    paper: ClassVar[str] = "arXiv 2401.10774"
    guarantee: ClassVar[str] = "lossy"
    needs: ClassVar[str] = "nothing"
    neutral: ClassVar[dict[str, object]] = {"epsilon": 1.0, "delta": 1e9}
    traits: ClassVar[Traits] = Traits("verify")
    tight: ClassVar[dict[str, object]] = {"epsilon": 0.01, "delta": 0.1}

    def __post_init__(self) -> None:
        if not 0 < self.epsilon <= 1:
            raise UserError(f"typical: epsilon={self.epsilon} must be above 0 and at most 1")
        if not self.delta > 0:
            raise UserError(f"typical: delta={self.delta} must be above 0")

    def __call__(self, draft: Draft, p: Dist, rng: Random) -> tuple[list[int], int]:
        if p.greedy(0):
            return MATCH(draft, p, rng)
        chances = self._accepted(draft, p)
        path = _longest(draft, chances, -1)
        while True:
            node = path[-1] if path else -1
            token = p.draw(node + 1, rng(len(path), Purpose.SAMPLE))
            child = next((each for each in draft.children(node) if draft.tokens[each] == token), None)
            if child is None:
                return path, token
            path += [child, *_longest(draft, chances, child)]

    def _accepted(self, draft: Draft, p: Dist) -> list[float]:
        """The probability of each guess after its parent; 0 of those that the rule does not accept."""
        if not draft.tokens:
            return []
        rows = torch.stack([p.row(row) for row in range(len(draft.tokens) + 1)])  # [nodes + 1, V]
        parents = torch.tensor(draft.parents, device=rows.device) + 1
        chances = rows[parents, torch.tensor(draft.tokens, device=rows.device)]
        accepted: list[float] = torch.where(chances > self.thresholds(rows)[parents], chances, 0.0).tolist()
        return accepted

    def thresholds(self, rows: Tensor) -> Tensor:
        """min(epsilon, delta exp(-H)) of probabilities [rows, V]."""
        entropies: Tensor = torch.special.entr(rows).sum(-1)
        return (self.delta * entropies.neg().exp()).clamp(max=self.epsilon)


def _longest(draft: Draft, chances: Sequence[float], root: int) -> list[int]:
    """The longest path of accepted guesses below a node, the likeliest of equally long ones."""
    found: dict[int, tuple[list[int], float]] = {root: ([], 0.0)}  # by last node: the path, and its log-probability
    for node in range(root + 1, len(draft.tokens)):
        above = found.get(draft.parents[node])
        if above is not None and chances[node] > 0:
            found[node] = [*above[0], node], above[1] + math.log(chances[node])
    return max(found.values(), key=lambda each: (len(each[0]), each[1]))[0]
