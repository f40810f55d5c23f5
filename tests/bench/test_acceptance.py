"""Closed forms of acceptance, against enumeration, the verifiers themselves, and a linear program for the best."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from phasewise.bench import acceptance
from phasewise.methods.verify.k_seq import KSeq
from phasewise.methods.verify.rejection import Rejection
from phasewise.reproduce.sampled import GuessOutcome, as_expected
from phasewise.verbs.draft import Drawn
from phasewise.verbs.verify import Verifier
from tests.lazy import lazy
from tests.speculation.markov import Tree, target
from tests.verify.test_acceptance import accepted

optimize: Any = lazy("scipy.optimize")

PAIRS = range(12)


def pair(seed: int, vocab: int = 5, sharp: float = 1.5) -> tuple[Tensor, Tensor]:
    gen = torch.Generator().manual_seed(seed)
    p, q = (torch.randn(vocab, generator=gen, dtype=torch.float64) * sharp for _ in range(2))
    return p.softmax(0), (p * 0.5 + q).softmax(0)


def chances(q: Tensor, n: int, distinct: bool) -> dict[tuple[int, ...], float]:
    """Of every ordered draw of n tokens."""
    found = {}
    for draw in itertools.product(range(len(q)), repeat=n):
        chance, left = 1.0, 1.0
        for i, token in enumerate(draw):
            chance *= 0.0 if distinct and token in draw[:i] else float(q[token]) / left
            left -= float(q[token]) if distinct else 0.0
        if chance > 0:
            found[draw] = chance
    return found


def transport(p: Tensor, draws: dict[tuple[int, ...], float]) -> float:
    """The most weight that can flow from draws to tokens in them, no token getting more than its p."""
    sets: dict[frozenset[int], float] = {}
    for draw, chance in draws.items():
        sets[frozenset(draw)] = sets.get(frozenset(draw), 0.0) + chance
    flows = [(i, token) for i, tokens in enumerate(sets) for token in sorted(tokens)]
    limits = np.array([*sets.values(), *p.tolist()])
    table = np.zeros((len(limits), len(flows)))
    for column, (i, token) in enumerate(flows):
        table[i, column] = table[len(sets) + token, column] = 1.0
    return -float(optimize.linprog(-np.ones(len(flows)), A_ub=table, b_ub=limits, method="highs").fun)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_the_best_possible_with_replacement(n: int) -> None:
    for seed in PAIRS:
        p, q = pair(seed)
        best = transport(p, chances(q, n, distinct=False))
        assert acceptance.best_independent(p, q, n) == pytest.approx(best, abs=1e-10)
        for rule in (acceptance.independent, acceptance.together):
            assert rule(p, q, n) <= best + 1e-10
        assert acceptance.together(p, q, n) >= (1 - 1 / math.e) * best


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_the_best_possible_without_replacement(n: int) -> None:
    """The closed form, the least over all sets of tokens, and the linear program are one number."""
    for seed in PAIRS:
        p, q = pair(seed)
        draws = chances(q, n, distinct=True)
        best = transport(p, draws)
        sets = (set(some) for size in range(6) for some in itertools.combinations(range(5), size))
        least = min(
            float(p[list(some)].sum()) + 1 - sum(chance for draw, chance in draws.items() if some.issuperset(draw))
            for some in sets
        )
        assert acceptance.best_distinct(p, q, n) == pytest.approx(best, abs=1e-9)
        assert least == pytest.approx(best, abs=1e-10)
        if n == 2:
            assert acceptance.best_two_distinct(p, q) == pytest.approx(best, abs=1e-10)
            assert acceptance.two_distinct(p, q) <= best + 1e-10


@pytest.mark.parametrize("n", [3, 4])
def test_prefixes_of_the_wrong_order_are_not_enough(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The least over sets of the largest p / q is more: the order is what makes so few sets do."""
    wanted = [acceptance.best_distinct(*pair(seed), n) for seed in PAIRS]
    monkeypatch.setattr(acceptance, "_ordered", lambda p, q: tuple(x[(p / q).argsort(descending=True)] for x in (p, q)))
    assert any(acceptance.best_distinct(*pair(seed), n) > want + 0.01 for seed, want in zip(PAIRS, wanted))


@pytest.mark.parametrize("sharp", [1.5, 12.0, 25.0])
def test_two_ways_to_the_best_of_two_distinct_guesses(sharp: float) -> None:
    """In closed form and by the clock of arrivals, on flat and on all but certain distributions."""
    for seed in PAIRS:
        p, q = pair(seed, vocab=40, sharp=sharp)
        assert acceptance.by_arrivals(p, q, 2) == pytest.approx(acceptance.best_two_distinct(p, q), abs=1e-9)


@pytest.mark.thorough
def test_distinct_guesses_on_average() -> None:
    """Each value is right on average over the guesses that are drawn for it: exact for two, near for three."""
    p, q = pair(2, vocab=6)
    draws = torch.rand(4000, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64).tolist()
    some = [acceptance.distinct(p, q, 3, iter(us).__next__) for us in draws]
    got = accepted(Rejection(), Tree(q.float().expand(6, -1), (3,), "without_replacement"), p.float(), 4000)
    assert sum(some) / len(some) == pytest.approx(got, abs=0.02)
    assert acceptance.distinct(p, q, 2, iter(()).__next__) == acceptance.two_distinct(p, q)
    assert acceptance.distinct(p, q, 1, iter(()).__next__) == acceptance.single(p, q)
    assert acceptance.two_distinct(p, q) + 0.02 < got <= acceptance.best_distinct(p, q, 3) + 0.02


def test_chosen_guesses_and_more_of_them_than_tokens() -> None:
    p, q = pair(4)
    assert acceptance.chosen(p, q, 2) == pytest.approx(float(p[q.topk(2).indices].sum()))
    for form in (acceptance.chosen, acceptance.top_plus_one, acceptance.best_distinct):
        assert form(p, q, 9) == pytest.approx(1.0)
    assert acceptance.distinct(p, q, 9, lambda: 0.5) == pytest.approx(1.0)
    sure = torch.tensor([0.0, 1.0, 0.0], dtype=torch.float64)
    assert acceptance.distinct(sure, sure, 3, lambda: 0.5) == acceptance.best_distinct(sure, sure, 3) == 1.0


@pytest.mark.parametrize("n", [1, 2, 3])
def test_top_and_one_reach_the_best_possible_for_them(n: int) -> None:
    for seed in PAIRS:
        p, q = pair(seed)
        top = q.topk(n - 1).indices.tolist()
        rest = q.clone()
        rest[top] = 0
        draws = {(*top, z): float(rest[z] / rest.sum()) for z in range(len(q)) if z not in top}
        assert acceptance.top_plus_one(p, q, n) == pytest.approx(transport(p, draws), abs=1e-10)


def test_two_distinct_guesses_by_enumeration() -> None:
    for seed in PAIRS:
        p, q = pair(seed)
        rest = (p - q).clamp_min(0) / (p - q).clamp_min(0).sum()
        want = 0.0
        for (first, second), chance in chances(q, 2, distinct=True).items():
            one, other = min(1.0, float(p[first] / q[first])), float(q[second] / (1 - q[first]))
            want += chance * (one + (1 - one) * min(1.0, float(rest[second]) / other))
        assert acceptance.two_distinct(p, q) == pytest.approx(want, abs=1e-12)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("verify", "drawn", "n"),
    [
        (Rejection(), "iid", 3),
        (Rejection(), "without_replacement", 2),
        (Rejection(), "top_plus_one", 3),
        (KSeq(), "iid", 3),
    ],
)
def test_verifiers_accept_what_the_forms_say(verify: Verifier, drawn: Drawn, n: int) -> None:
    p, q = pair(3, vocab=6)
    forms = {"without_replacement": acceptance.two_distinct(p, q), "top_plus_one": acceptance.top_plus_one(p, q, n)}
    forms["iid"] = (acceptance.together if isinstance(verify, KSeq) else acceptance.independent)(p, q, n)
    got = accepted(verify, Tree(q.float().expand(6, -1), (n,), drawn), p.float(), 2000)
    assert got == pytest.approx(forms[drawn], abs=0.03)
    assert abs(got - acceptance.single(p, q)) > 0.05, "one guess would do as well: this test tests nothing"


def test_equal_distributions_and_certain_ones() -> None:
    p, _ = pair(0)
    sure = torch.tensor([0.0, 1.0, 0.0], dtype=torch.float64)
    for both in (p, sure):
        found = [
            acceptance.single(both, both), acceptance.independent(both, both, 2), acceptance.together(both, both, 1),
            acceptance.two_distinct(both, both), acceptance.best_independent(both, both, 2),
        ]  # fmt: skip
        assert found == pytest.approx([1.0] * 5)
    assert acceptance.top_plus_one(sure, sure, 2) == 1.0
    other = torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64)
    assert acceptance.two_distinct(sure, other) == acceptance.best_independent(sure, other, 3) == 0.0


@pytest.mark.parametrize("lax", [False, True])
def test_shares_that_are_off_are_noticed(lax: bool) -> None:
    """A verifier that accepts its first guesses unseen says the target's likeliest token too seldom."""
    p, q = pair(1, vocab=6)
    draft, row = Tree(q.float().expand(6, -1), (1,), "iid"), p.float()
    best, seen = int(row.argmax()), list[GuessOutcome]()
    for seed in range(600):
        guess = draft(0, seed, 0)
        numbers = torch.Generator().manual_seed(seed)
        us = torch.rand(9, generator=numbers).tolist()
        path, token = Rejection()(guess, target(row.expand(6, -1), guess, 0), lambda d, k, i=0, us=us: us[2 * d + k])
        said = guess.tokens[0] if path or lax else token
        seen.append(GuessOutcome(bool(path), said == best, float(row[best]), (acceptance.single(p, q),)))
    assert as_expected(seen).passed is not lax
