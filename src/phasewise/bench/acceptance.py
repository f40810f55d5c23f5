"""Acceptance rates of several guesses for a token in closed form, and the best possible rate.

`p` is what the target says, `q` what the guesses are drawn from, both float64 [V]; `n` guesses are made.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from phasewise.methods.verify.k_seq import slack

SMALL = 1e-300  # instead of dividing by nothing
FIRST, LAST, STEP = (
    -28.0,
    4.0,
    0.4,
)  # logarithms of times, see `by_arrivals`: earlier or later there is nothing to count


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
    scale = 1 / _others(q).clamp_min(SMALL)
    ratio = rest / q.clamp_min(SMALL)
    order = ratio.argsort()
    ends = torch.searchsorted(ratio[order], scale)  # up to there what is left is less than scale q
    less, more = _before(rest[order]), _before(q[order].flip(0)).flip(0)
    second = less[ends] + scale * more[ends]
    return first + float((refused * second).sum())


def distinct(p: Tensor, q: Tensor, n: int, u: Callable[[], float]) -> float:
    """The acceptance of as many guesses drawn without replacement and rejected one after the other: a number that is
    right on average over the first n - 2 of them, which are drawn by `u`. For two guesses it is exact."""
    if n == 2:
        return two_distinct(p, q)
    first = single(p, q)
    left, refused = (p - q).clamp_min(0), (q - p).clamp_min(0)
    if n == 1 or float(left.sum()) <= 0:
        return first
    token = min(int(torch.searchsorted(refused.cumsum(0), u() * float(refused.sum()))), len(q) - 1)
    others = q.clone()
    others[token] = 0.0
    if float(others.sum()) <= 0:
        return first  # there is nothing else to guess
    return first + (1 - first) * distinct(left / left.sum(), others / others.sum(), n - 1, u)


def chosen(p: Tensor, q: Tensor, n: int) -> float:
    """The n likeliest tokens, matched with what the target draws: the most for such guesses."""
    return float(p[q.topk(min(n, len(q))).indices].sum())


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
    odds = q / _others(q).clamp_min(SMALL)
    both = (odds * _before(q)[:-1] + q * _before(odds)[:-1]).cumsum(0)  # one of them the last of H, the other before
    return float((p.cumsum(0) - both).min().clamp_max(0)) + 1


def best_distinct(p: Tensor, q: Tensor, n: int) -> float:
    """With n guesses drawn without replacement; if q has fewer tokens, with all of these."""
    n = min(n, int((q > 0).sum()))
    if n == 1:
        return single(p, q)
    return best_two_distinct(p, q) if n == 2 else by_arrivals(p, q, n)


def by_arrivals(p: Tensor, q: Tensor, n: int) -> float:
    """The same for two guesses and more. Let tokens arrive at times drawn from exponential laws of rates q: their order
    is that of draws without replacement. All n guesses lie in H if n of its tokens arrive before any other does, which
    is integrated over the time of that one; how many tokens have arrived by then is a sum of independent events."""
    p, q = _ordered(p, q)
    outside = _before(q.flip(0)).flip(0)[1:]  # rates of what is not in H
    slowest = float(q[q > 0].min())
    times = np.exp(np.arange(FIRST / n, LAST - math.log(slowest), STEP))
    weights = times * STEP
    weights[-1] /= 2
    fewer = np.zeros((n, len(times)))  # chances that so many of H have arrived
    fewer[0] = 1.0
    weight, least = 0.0, 0.0
    for mass, rate, beyond in zip(p.tolist(), q.tolist(), outside.tolist()):
        arrived = -np.expm1(-rate * times)
        fewer[1:] += arrived * (fewer[:-1] - fewer[1:])
        fewer[0] *= 1 - arrived
        enough = 1 - fewer.sum(0)
        inside = float((weights * np.exp(-beyond * times)) @ enough) * beyond
        inside += math.exp(-beyond * float(times[-1])) * float(enough[-1])
        weight += mass
        least = min(least, weight - inside)
        if weight >= 1 + least:
            break  # as `inside` is at most 1
    return 1 + least


def _ordered(p: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    order = (p / q.clamp_min(SMALL)).argsort()
    return p[order], q[order]


def _before(x: Tensor) -> Tensor:
    """[V + 1]: sums of what comes before each place, without a difference in which small numbers would be lost."""
    return torch.cat((x.new_zeros(1), x.cumsum(0)))


def _others(q: Tensor) -> Tensor:
    """1 - q, to the last digit where that is next to nothing."""
    return _before(q)[:-1] + _before(q.flip(0)).flip(0)[1:]
