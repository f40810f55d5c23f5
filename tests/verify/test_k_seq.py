"""K-SEQ: its law by enumeration, its acceptance between its guarantee and the best possible."""

from __future__ import annotations

import itertools
from math import e, prod
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from phasewise.methods.verify.k_seq import KSeq, slack
from phasewise.methods.verify.rejection import Rejection
from phasewise.verbs.draft import Draft
from phasewise.verbs.sample import Dist, Purpose, uniform
from tests.lazy import lazy
from tests.speculation.markov import Tree, relative, table, target

optimize: Any = lazy("scipy.optimize")

VOCAB = 4
CASES = [*((seed, k) for seed in range(3) for k in (1, 2, 3)), (3, 4)]


def rows(seed: int) -> tuple[Tensor, Tensor]:
    gen = torch.Generator().manual_seed(seed)
    p = torch.randn(VOCAB, generator=gen, dtype=torch.float64) * 2
    return p.softmax(-1), (p + torch.randn(VOCAB, generator=gen, dtype=torch.float64)).softmax(-1)


def said(p: Tensor, q: Tensor, tokens: tuple[int, ...], accept: dict[int, float], last: float) -> int:
    """The token that follows, with these random numbers; guesses without one are refused wherever they may be."""
    draft = Draft(list(tokens), [-1] * len(tokens), "iid", q.expand(len(tokens), -1))
    dist = Dist([int(p.argmax())] * (len(tokens) + 1), VOCAB, range(len(tokens) + 1), p.expand(len(tokens) + 1, -1))

    def rng(depth: int, purpose: int, index: int = 0) -> float:
        return accept.get(index, 1 - 1e-12) if purpose == Purpose.ACCEPT and depth == 0 else last

    path, token = KSeq()(draft, dist, rng)
    return draft.tokens[path[0]] if path else token


@pytest.mark.parametrize(("seed", "k"), CASES)
def test_the_law_is_the_targets(seed: int, k: int) -> None:
    """Enumerated over all drafts: chances are multiplied from the thresholds at which the verifier really turns."""
    p, q = rows(seed)
    rho = slack(p, q, k)
    chance = (p / (rho * q)).clamp(max=1.0)
    rest = (p - rho * q).clamp(min=0.0)
    rest /= rest.sum()
    law, accepted = torch.zeros(VOCAB, dtype=torch.float64), 0.0
    for tokens in itertools.product(range(VOCAB), repeat=k):
        weight = prod(float(q[t]) for t in tokens)
        for i, token in enumerate(tokens):
            law[token] += weight * chance[token]
            accepted += weight * float(chance[token])
            weight *= 1 - float(chance[token])
            if all(chance[t] < 1 for t in tokens[: i + 1]):  # those before are refused, this one is at its threshold
                assert said(p, q, tokens, {i: float(chance[token]) - 1e-9}, 0.5) == token
                assert said(p, q, tokens, {i: float(chance[token]) + 1e-9}, 0.5) != token
        law += weight * rest
        if all(chance[t] < 1 for t in tokens):
            edges = [0.0, *rest.cumsum(0).tolist()]
            for token in range(VOCAB):
                if rest[token] > 1e-6:
                    assert said(p, q, tokens, {}, (edges[token] + edges[token + 1]) / 2) == token
    assert float((law - p).abs().max()) < 1e-10
    best = transport(p, q, k)
    assert accepted == pytest.approx(rho * float(q.minimum(p / rho).sum()), abs=1e-10)
    assert (1 - 1 / e) * best - 1e-9 <= accepted <= best + 1e-9


def transport(p: Tensor, q: Tensor, k: int) -> float:
    """The best acceptance of any rule for k independent guesses: what can flow from sets of guesses to tokens."""
    sets: dict[tuple[int, ...], float] = {}
    for tokens in itertools.product(range(VOCAB), repeat=k):
        key = tuple(sorted(set(tokens)))
        sets[key] = sets.get(key, 0.0) + prod(float(q[t]) for t in tokens)
    flows = [(i, token) for i, key in enumerate(sets) for token in key]
    bounds = np.zeros((len(sets) + VOCAB, len(flows)))
    for at, (i, token) in enumerate(flows):
        bounds[i, at] = bounds[len(sets) + token, at] = 1
    solved = optimize.linprog(-np.ones(len(flows)), A_ub=bounds, b_ub=[*sets.values(), *p.tolist()], method="highs")
    return float(-solved.fun)


def test_one_chain_is_rejection_bit_for_bit() -> None:
    p = table(6, seed=1)
    q = relative(p, seed=2)
    for seed in range(400):
        draft = Tree(q, (1, 1, 1), "iid")(0, seed, 0)

        def rng(depth: int, purpose: int, index: int = 0, seed: int = seed) -> float:
            return uniform(seed, depth, purpose, index)

        dist = target(p, draft, 0)
        assert KSeq()(draft, dist, rng) == Rejection()(draft, dist, rng)


def test_branches_with_the_accepted_token_go_on_together() -> None:
    """Three chains from the root; the first two begin alike, and only the second goes on as the target does."""
    draft = Draft([1, 2, 1, 3, 4, 5], [-1, 0, -1, 2, -1, 4], "iid", torch.eye(6)[[1, 2, 1, 3, 4, 5]])
    tokens = [1, 3, 0, 3, 0, 0, 0]
    rows = torch.eye(6)[tokens]
    for dist in (Dist(tokens, 6), Dist(tokens, 6, range(7), rows)):
        assert KSeq()(draft, dist, lambda *_: 0.5) == ([2, 3], 0)


@pytest.mark.parametrize("drawn", ["point", "without_replacement", "top_plus_one"])
def test_other_guesses_are_judged_by_rejection(drawn: str) -> None:
    p = table(6, seed=1)
    for seed in range(100):
        draft = Tree(relative(p, seed=2), (2, 2), drawn)(0, seed, 0)  # type: ignore[arg-type]

        def rng(depth: int, purpose: int, index: int = 0, seed: int = seed) -> float:
            return uniform(seed, depth, purpose, index)

        dist = target(p, draft, 0)
        assert KSeq()(draft, dist, rng) == Rejection()(draft, dist, rng)
