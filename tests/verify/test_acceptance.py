"""How much is accepted: the closed forms, with context-free target and drafter."""

from __future__ import annotations

import itertools

import pytest
import torch

from phasewise.methods.verify.match import Match
from phasewise.methods.verify.rejection import Rejection
from phasewise.verbs.draft import Draft
from phasewise.verbs.sample import Purpose, uniform
from phasewise.verbs.verify import Verifier
from tests.speculation.markov import Tree, target

VOCAB, RUNS = 6, 4000


def rows(seed: int, sharp: float = 1.2) -> tuple[torch.Tensor, torch.Tensor]:
    """p and q [V], alike enough to accept often."""
    gen = torch.Generator().manual_seed(seed)
    logits = torch.randn(VOCAB, generator=gen) * sharp
    return logits.softmax(-1), (logits + torch.randn(VOCAB, generator=gen) * 0.7).softmax(-1)


def accepted(verify: Verifier, drafter: Tree, p: torch.Tensor, runs: int = RUNS) -> float:
    """Mean number of accepted nodes per pass."""
    total = 0
    for seed in range(runs):
        draft = drafter(0, seed, 0)

        def rng(depth: int, purpose: int, index: int = 0, seed: int = seed) -> float:
            return uniform(seed, depth, purpose, index)

        total += len(verify(draft, target(p.expand(VOCAB, -1), draft, 0), rng)[0])
    return total / runs


@pytest.mark.parametrize(("seed", "length"), [(0, 1), (1, 3)])
def test_tokens_per_pass_of_a_chain(seed: int, length: int) -> None:
    """(1 - a^(n+1)) / (1 - a), a = sum of min(p, q)."""
    p, q = rows(seed)
    alpha = float(torch.minimum(p, q).sum())
    got = 1 + accepted(Rejection(), Tree(q.expand(VOCAB, -1), [1] * length, "iid"), p)
    assert got == pytest.approx((1 - alpha ** (length + 1)) / (1 - alpha), rel=0.03)


def test_a_perfect_drafter_is_always_accepted() -> None:
    p, _ = rows(3)
    for drawn in ("iid", "without_replacement"):
        assert accepted(Rejection(), Tree(p.expand(VOCAB, -1), (2, 1, 1), drawn), p, 300) == 3


@pytest.mark.parametrize("children", [1, 2, 3])
def test_chosen_children_are_accepted_by_their_mass(children: int) -> None:
    """Rule P: acceptance = p(the children), and `match` is the same rule."""
    p, q = rows(4)
    tree = Tree(q.expand(VOCAB, -1), (children,), "point")
    want = float(p[q.topk(children).indices].sum())
    assert accepted(Rejection(), tree, p) == pytest.approx(want, abs=0.025)
    assert accepted(Match(), tree, p) == accepted(Rejection(), tree, p)


@pytest.mark.parametrize("children", [2, 3])
def test_top_plus_one_attains_its_optimum(children: int) -> None:
    """Rule G: p(Top) + sum over the others of min(p, q'), q' = q without Top, renormalised."""
    p, q = rows(5)
    top = q.topk(children - 1).indices
    rest = q.clone()
    rest[top] = 0
    rest /= rest.sum()
    want = float(p[top].sum() + torch.minimum(p, rest).sum())  # rest is 0 on Top
    got = accepted(Rejection(), Tree(q.expand(VOCAB, -1), (children,), "top_plus_one"), p)
    assert got == pytest.approx(want, abs=0.025)


@pytest.mark.parametrize("drawn", ["iid", "without_replacement"])
def test_two_siblings_by_enumeration(drawn: str) -> None:
    """Rules M and R: the chance that one of two ordered siblings is accepted, summed over all draws."""
    p, q = rows(6)
    want = 0.0
    residual = (p - q).clamp(min=0)
    residual /= residual.sum()
    for first, second in itertools.product(range(VOCAB), repeat=2):
        q2 = q.clone()
        if drawn == "without_replacement":
            q2[first] = 0
            q2 /= q2.sum()
        one = min(1.0, float(p[first] / q[first]))
        two = min(1.0, float(residual[second] / q2[second])) if q2[second] > 0 else 0.0
        want += float(q[first] * q2[second]) * (one + (1 - one) * two)
    got = accepted(Rejection(), Tree(q.expand(VOCAB, -1), (2,), drawn), p)
    assert got == pytest.approx(want, abs=0.025)


# ---- single verdicts


def verdict(draft: Draft, p: list[list[float]], numbers: dict[tuple[int, int, int], float]) -> tuple[list[int], int]:
    """Of `rejection` for given rows (pending token first) and random numbers by (depth, purpose, index)."""
    from phasewise.verbs.sample import Dist

    table = torch.tensor(p)
    dist = Dist(table.argmax(-1).tolist(), table.shape[1], range(len(p)), table)
    return Rejection()(draft, dist, lambda depth, purpose, index=0: numbers[depth, purpose, index])


def test_an_empty_residual_falls_back_to_the_target() -> None:
    """p = q up to rounding, and a rejection all the same: draw from p, not from nothing."""
    q = torch.tensor([[0.5, 0.5 + 6e-8, 0.0]])
    draft = Draft.chain([1], "iid", q)
    numbers = {(0, Purpose.ACCEPT, 0): 1.0 - 2**-53, (0, Purpose.RESIDUAL, 0): 0.9, (1, Purpose.SAMPLE, 0): 0.0}
    path, token = verdict(draft, [[0.5, 0.5, 0.0]] * 2, numbers)
    assert (path, token) == ([0], 0), "the token p draws there is the rejected child's: following it is the same"


def test_what_the_target_never_says_is_never_accepted() -> None:
    """p(x) = 0, and the smallest random number."""
    draft = Draft.chain([0], "iid", torch.tensor([[0.5, 0.5]]))
    numbers = {(0, Purpose.ACCEPT, 0): 0.0, (0, Purpose.RESIDUAL, 0): 0.0}
    assert verdict(draft, [[0.0, 1.0]] * 2, numbers) == ([], 1)


def test_a_drawn_draft_of_unknown_q_is_matched() -> None:
    draft = Draft.chain([1], "iid", None)
    numbers = {(0, Purpose.SAMPLE, 0): 0.6, (1, Purpose.SAMPLE, 0): 0.1}
    assert verdict(draft, [[0.5, 0.5]] * 2, numbers) == ([0], 0)


def test_greedy_rows_follow_the_best_path() -> None:
    from phasewise.verbs.sample import Dist

    draft = Draft([4, 5, 6, 7], [-1, -1, 1, 2])
    path, token = Rejection()(draft, Dist([5, 0, 6, 8, 9], 10), lambda *_: 1 / 0)
    assert (path, token) == ([1, 2], 8)
