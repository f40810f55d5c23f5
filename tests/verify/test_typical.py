"""Typical acceptance: its closed forms, its choice among paths, and the settings at which it is exact."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from phasewise.errors import UserError
from phasewise.methods.verify.match import Match
from phasewise.methods.verify.typical import Typical
from phasewise.request.params import Params
from phasewise.verbs.draft import Draft
from phasewise.verbs.sample import Dist, uniform
from tests import tiny

DRAFT = "draft_model:model=tiny-draft,k=3,branches=2"


def judge(verify: Typical | Match, p: Tensor, draft: Draft, seed: int = 0) -> tuple[list[int], int]:
    dist = Dist([-1] * len(p), p.shape[1], range(len(p)), p)
    return verify(draft, dist, lambda depth, purpose, index=0: uniform(seed, depth, purpose, index))


def random_case(seed: int) -> tuple[Tensor, Draft]:
    gen = torch.Generator().manual_seed(seed)
    p = (torch.randn(8, 6, generator=gen) * 2).softmax(-1)
    return p, Draft(torch.randint(0, 6, (7,), generator=gen).tolist(), [-1, -1, 0, 0, 2, 1, 4])


def test_closed_forms() -> None:
    """Of n equally likely tokens the threshold is delta / n at most, so each is accepted; of one, epsilon or delta."""
    for n in (2, 7, 64):
        p = torch.zeros(64)
        p[:n] = 1 / n
        assert float(Typical(0.09, 0.3).thresholds(p[None])) == pytest.approx(min(0.09, 0.3 / n))
    assert float(Typical(0.09, 0.3).thresholds(torch.tensor([[0.0, 1.0]]))) == pytest.approx(0.09)
    assert float(Typical(0.5, 0.3).thresholds(torch.tensor([[0.0, 1.0]]))) == pytest.approx(0.3)


@given(st.integers(0, 10_000), st.floats(0.01, 1), st.floats(0.01, 3))
def test_the_longest_likeliest_typical_path_is_taken(seed: int, epsilon: float, delta: float) -> None:
    """Against all paths; behind it a token is drawn as `match` does, and what it meets is gone on with."""
    p, draft = random_case(seed)
    verify = Typical(epsilon, delta)
    path, token = judge(verify, p, draft, seed)
    rows = {-1: 0} | {node: node + 1 for node in range(7)}
    entropies = -(p * p.log()).sum(-1)
    bars = [min(epsilon, delta * math.exp(-float(h))) for h in entropies]
    chains: list[tuple[float, float, list[int]]] = [(0, 0.0, [])]
    for end in range(7):
        nodes, at = list[int](), end
        while at >= 0:
            nodes, at = [at, *nodes], draft.parents[at]
        steps = [(rows[draft.parents[node]], draft.tokens[node]) for node in nodes]
        if all(float(p[row, guess]) > bars[row] for row, guess in steps):
            chains.append((len(nodes), sum(math.log(float(p[row, guess])) for row, guess in steps), nodes))
    best = max(chains, key=lambda chain: chain[:2])[2]
    assert path[: len(best)] == best
    drawn = [draft.tokens[node] for node in path[len(best) :]] + [token]
    if len(path) == len(best):
        node = path[-1] if path else -1
        assert all(draft.tokens[child] != token for child in draft.children(node))
    assert drawn[0] == Dist([-1], 6, [0], p[rows[best[-1] if best else -1]][None]).draw(0, uniform(seed, len(best), 0))


@given(st.integers(0, 10_000))
def test_nothing_unusual_is_match(seed: int) -> None:
    p, draft = random_case(seed)
    for epsilon, delta in ((1.0, math.inf), (1.0, 1e9)):
        assert judge(Typical(epsilon, delta), p, draft, seed) == judge(Match(), p, draft, seed)


def outs(verify: str, params: Params, schedule: str = "prefill_first") -> list[list[int]]:
    placed = tiny.engine({"draft": DRAFT, "verify": verify, "schedule": schedule})
    return tiny.outs(tiny.run(placed, tiny.prompts(20, 7, 60), params))


SAMPLED = Params(max_tokens=30, temperature=1.0, seed=3, ignore_eos=True)


def test_greedy_answers_are_exact_and_sampled_ones_are_not() -> None:
    prompts = tiny.prompts(20, 7, 60)
    assert outs("typical", tiny.greedy(30)) == tiny.plain(prompts, tiny.greedy(30))
    assert outs("typical:epsilon=1,delta=1e9", SAMPLED) == tiny.plain(prompts, SAMPLED)
    assert outs("typical:epsilon=0.01,delta=0.1", SAMPLED) != tiny.plain(prompts, SAMPLED)


@pytest.mark.parametrize("schedule", ["splitfuse:budget=5"])
def test_no_load_cuts_a_guess(schedule: str) -> None:
    assert outs("typical:epsilon=0.01", SAMPLED, schedule) == outs("typical:epsilon=0.01", SAMPLED)


@pytest.mark.parametrize(("knob", "value"), [*product(["epsilon"], ["0", "1.5"]), *product(["delta"], ["0", "-1"])])
def test_wrong_knobs_are_named(knob: str, value: str) -> None:
    with pytest.raises(UserError, match=f"typical: {knob}="):
        tiny.engine({"draft": DRAFT, "verify": f"typical:{knob}={value}"})
