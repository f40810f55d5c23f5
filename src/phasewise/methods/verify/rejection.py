"""Rejection sampling along chains and trees (arXiv 2211.17192, 2302.01318): keeps the target's distribution and accepts
a sampled draft as often as its own distribution allows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from phasewise.verbs.draft import Draft
from phasewise.verbs.method import Method
from phasewise.verbs.sample import Dist, Purpose
from phasewise.verbs.traits import Traits
from phasewise.verbs.verify import Random


@dataclass(frozen=True)
class Rejection(Method):
    """One rule for every draft, because a draft says what each node was drawn from.

    At a node, each drawn child in turn is accepted with probability min(1, p / q); after a rejection p becomes the
    normalised (p - q)+. Then one token is drawn from what is left of p: it is either a chosen child, which is accepted,
    or emitted. On a chain this is speculative sampling; on siblings drawn independently, multi-step rejection
    (SpecInfer, arXiv 2305.09781); without replacement, RSD (arXiv 2402.14160); on top-plus-one siblings, the optimal
    rule for greedy multi-drafts (arXiv 2502.18779); on chosen tokens alone, or at temperature 0, plain matching.
    """

    paper: ClassVar[str] = "arXiv 2211.17192"
    guarantee: ClassVar[str] = "distribution"
    needs: ClassVar[str] = "nothing"
    neutral: ClassVar[dict[str, object]] = {}
    # the residual and the acceptance draw numbers of their own
    traits: ClassVar[Traits] = Traits("verify", matches="point")

    def __call__(self, draft: Draft, p: Dist, rng: Random) -> tuple[list[int], int]:
        path: list[int] = []
        while True:
            child, token = _step(draft, path, p, rng)
            if child is None:
                return path, token
            path.append(child)


def _step(draft: Draft, path: list[int], p: Dist, rng: Random) -> tuple[int | None, int]:
    """The child of the path's end that is accepted, and its token; or None and the token that follows instead."""
    node, depth = path[-1] if path else -1, len(path)
    children = draft.children(node)
    if p.greedy(node + 1):
        token = p.top[node + 1]
    else:
        left, purpose = p.row(node + 1), Purpose.SAMPLE
        for i, child in enumerate(children if draft.q is not None else ()):
            assert draft.q is not None
            guess, q = draft.tokens[child], draft.q[child]
            mass = float(q[guess])
            if mass == 0.0:
                continue  # chosen, not drawn
            if rng(depth, Purpose.ACCEPT, i) * mass < float(left[guess]):
                return child, guess
            left, purpose = _residual(left, q), Purpose.RESIDUAL
        token = p.pick(left, rng(depth, purpose))
    return next((child for child in children if draft.tokens[child] == token), None), token


def _residual(p: Tensor, q: Tensor) -> Tensor:
    """The normalised (p - q)+; p itself where rounding has left nothing of it."""
    rest = (p - q).clamp_(min=0.0)
    total = rest.sum()
    return rest / total if float(total) > 0.0 else p
