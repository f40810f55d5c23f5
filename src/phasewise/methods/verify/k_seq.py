"""K-SEQ, the verifier of SpecTr (arXiv 2310.15141): several drafts drawn independently, each accepted a little less
often than alone, so that all together keep the target's distribution."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from torch import Tensor

from phasewise.methods.verify.rejection import Rejection
from phasewise.verbs.draft import Draft
from phasewise.verbs.method import Method
from phasewise.verbs.sample import Dist, Purpose
from phasewise.verbs.traits import Traits
from phasewise.verbs.verify import Random

HALVINGS = 60  # as fine as a float
REJECTION = Rejection()


@dataclass(frozen=True)
class KSeq(Method):
    """For guesses drawn with replacement (drawn=iid), in chains or trees; all others are judged as `rejection` does.

    The k guesses for one token are asked in turn, each accepted with probability min(1, p / (rho q)); if none is, the
    token is drawn from the normalised (p - rho q)+. Branches that carry the accepted token go on together. At least
    1 - 1/e of the best possible acceptance for such drafts; a reference, for `rejection` on guesses drawn without
    replacement mostly accepts more.
    """

    paper: ClassVar[str] = "arXiv 2310.15141"
    guarantee: ClassVar[str] = "distribution"
    needs: ClassVar[str] = "nothing"
    neutral: ClassVar[dict[str, object]] = {}
    traits: ClassVar[Traits] = Traits("verify", matches="point")

    def __call__(self, draft: Draft, p: Dist, rng: Random) -> tuple[list[int], int]:
        if draft.drawn != "iid" or draft.q is None or any(q[t] == 0 for q, t in zip(draft.q, draft.tokens)):
            return REJECTION(draft, p, rng)
        active, depth = [-1], 0  # nodes with the same tokens down to them
        while True:
            guesses = [child for node in active for child in draft.children(node)]
            token = _next(draft, guesses, p, active[0], partial(rng, depth))
            going_on = [child for child in guesses if draft.tokens[child] == token]
            if not going_on:
                return _path(draft, active[0]), token
            active, depth = going_on, depth + 1


def slack(p: Tensor, q: Tensor, k: int) -> float:
    """rho, from 1 to k: where 1 - (1 - b)^k = rho b, b being the sum of min(q, p / rho) over all tokens."""
    if k == 1:
        return 1.0
    low, high = 1.0, float(k)
    p, q = p.double(), q.double()
    for _ in range(HALVINGS):
        rho = (low + high) / 2
        b = float(q.minimum(p / rho).sum())
        low, high = (rho, high) if 1 - (1 - b) ** k > rho * b else (low, rho)
    return high


def _next(draft: Draft, guesses: list[int], p: Dist, node: int, u: Callable[..., float]) -> int:
    """The token after `node`: one of the guesses', if it is accepted."""
    if p.greedy(node + 1):
        return p.top[node + 1]
    row = p.row(node + 1)
    if not guesses:
        return p.pick(row, u(Purpose.SAMPLE))
    assert draft.q is not None
    q = draft.q[guesses[0]]
    rho = slack(row, q, len(guesses))
    for i, guess in enumerate(guesses):
        token = draft.tokens[guess]
        if u(Purpose.ACCEPT, i) * (rho * float(q[token])) < float(row[token]):
            return token
    rest = (row - rho * q).clamp_(min=0.0)
    total = rest.sum()
    return p.pick(rest / total if total > 0 else row, u(Purpose.RESIDUAL))


def _path(draft: Draft, node: int) -> list[int]:
    path: list[int] = []
    while node >= 0:
        path.append(node)
        node = draft.parents[node]
    return path[::-1]
