"""How often one of several guesses for a token is accepted, in closed form, and how often one could be at best.

`p` is what the target says, `q` what the guesses are drawn from, both float64 [V]; `n` guesses are made.
"""

from __future__ import annotations

import torch
from torch import Tensor

from phasewise.methods.verify.k_seq import slack

SMALL = 1e-300  # instead of dividing by nothing


def single(p: Tensor, q: Tensor) -> float:
    """One guess (arXiv 2211.17192)."""
    return float(p.minimum(q).sum())


def independent(p: Tensor, q: Tensor, n: int) -> float:
    """Guesses drawn independently, rejected one after the other (SpecInfer, arXiv 2305.09781): what a rejection leaves
    of p does not hang on the guess that was rejected."""
    left, refused = p, 1.0
    for _ in range(n):
        refused *= 1 - single(left, q)
        rest = (left - q).clamp_min(0)
        if float(rest.sum()) <= 0:
            break
        left = rest / rest.sum()
    return 1 - refused


def together(p: Tensor, q: Tensor, n: int) -> float:
    """Guesses drawn independently, judged by K-SEQ (SpecTr, arXiv 2310.15141): 1 - (1 - b)^n."""
    b = float(q.minimum(p / slack(p, q, n)).sum())
    return 1 - (1 - b) ** n


def two_distinct(p: Tensor, q: Tensor) -> float:
    """Two guesses drawn without replacement, rejected one after the other (RSD, arXiv 2402.14160)."""
    first = single(p, q)
    rest = (p - q).clamp_min(0)
    if float(rest.sum()) <= 0:
        return 1.0
    rest = rest / rest.sum()
    refused = (q - p).clamp_min(0)  # of each token: that it is guessed first, and rejected; then nothing of it is left
    scale = 1 / (1 - q).clamp_min(SMALL)
    order = (rest / q.clamp_min(SMALL)).argsort()
    ends = torch.searchsorted(
        (rest / q.clamp_min(SMALL))[order], scale
    )  # up to there what is left is less than scale q
    less, more = (torch.cat((each.new_zeros(1), each[order].cumsum(0))) for each in (rest, q))
    second = less[ends] + scale * (more[-1] - more[ends])
    return first + float((refused * second).sum())


def top_plus_one(p: Tensor, q: Tensor, n: int) -> float:
    """The n - 1 likeliest tokens and one drawn from the others (arXiv 2502.18779): the most for such guesses."""
    top = q.topk(min(n - 1, len(q))).indices
    rest = q.clone()
    rest[top] = 0.0
    total = float(rest.sum())
    return float(p[top].sum()) + (float(p.minimum(rest / total).sum()) if total > 0 else 0.0)


# ---- the best that any verifier can do (arXiv 2502.18779)
def best_independent(p: Tensor, q: Tensor, n: int) -> float:
    """With guesses drawn independently: the least, over sets H of tokens, of p(H) + 1 - q(H)^n. Sets of the smallest
    p / q are enough."""
    p, q = _ordered(p, q)
    return float((p.cumsum(0) - q.cumsum(0) ** n).min().clamp_max(0)) + 1


def best_two_distinct(p: Tensor, q: Tensor) -> float:
    """With two guesses drawn without replacement: the same, q(H)^n being the chance that both lie in H."""
    p, q = _ordered(p, q)
    inside = q.cumsum(0)
    odds = q / (1 - q).clamp_min(SMALL)
    both = inside * odds.cumsum(0) - (q * odds).cumsum(0)
    return float((p.cumsum(0) - both).min().clamp_max(0)) + 1


def _ordered(p: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    order = (p / q.clamp_min(SMALL)).argsort()
    return p[order], q[order]
