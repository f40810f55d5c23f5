"""How a number becomes a token: by either coupling tokens follow the distribution, and by Gumbel noise two
distributions that share their numbers agree about as often as any rule can make them."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor

from phasewise.errors import UserError
from phasewise.methods.sample.standard import Standard
from phasewise.options import parse
from phasewise.request.params import Params
from phasewise.request.request import Request
from phasewise.verbs.sample import Context, Coupling, Purpose, draw, pick, uniform
from tests import tiny
from tests.draft.relatives import relative
from tests.lazy import lazy

stats = lazy("scipy.stats")
VOCAB, DRAWS = 49_152, 1200
GUMBEL = "standard:coupling=gumbel"


def number(seed: int) -> float:
    return uniform(seed, 3, Purpose.SAMPLE)


@pytest.mark.parametrize("shared", [False, True])
def test_tokens_follow_the_distribution(shared: bool) -> None:
    """By themselves; and by one number for all draws, the test fails."""
    probs = torch.tensor([0.5, 0.0, 0.2, 0.15, 0.1, 0.05])
    n = 6000
    contexts = [Context(Request([0, 1], Params(temperature=1.0, seed=0 if shared else seed))) for seed in range(n)]
    dist = Standard("gumbel")(probs.log().repeat(n, 1), contexts)
    tokens = draw(dist, contexts)
    assert tokens == [dist.draw(i, uniform(c.request.params.seed, 2, 0)) for i, c in enumerate(contexts)]
    counts = torch.bincount(torch.tensor(tokens), minlength=6)
    assert counts[1] == 0
    kept = probs > 0
    p = stats.chisquare(counts[kept].numpy(), (probs[kept].double() / probs.double().sum() * n).numpy()).pvalue
    assert p < 1e-6 if shared else p > 1e-3


def test_noise_is_the_tokens_own() -> None:
    """Whatever is taken away beside a token that was drawn, it is drawn again: so a draft's choice lasts."""
    gen = torch.Generator().manual_seed(0)
    for seed in range(200):
        probs = torch.rand(40, generator=gen) ** 4
        token = pick(probs, number(seed), "gumbel")
        fewer = torch.where(torch.rand(40, generator=gen) < 0.5, probs, 0.0)
        fewer[token] = probs[token]
        assert pick(fewer * 3, number(seed), "gumbel") == token
        assert pick(fewer.index_fill(0, torch.tensor([token]), 0.0), number(seed), "gumbel") != token


@pytest.mark.parametrize("coupling", ["inverse", "gumbel"])
def test_what_has_no_weight_is_never_drawn(coupling: Coupling) -> None:
    gen = torch.Generator().manual_seed(0)
    for seed in range(300):
        probs = torch.rand(50, generator=gen) * (torch.rand(50, generator=gen) < 0.1)
        probs[7] = 1e-30
        for u in (0.0, (2**53 - 1) / 2**53, number(seed)):
            assert probs[pick(probs, u, coupling)] > 0


# ---- how often two that share a number agree
def bound(p: Tensor, q: Tensor) -> float:
    """The most that any coupling can reach: 1 less the total variation distance."""
    return float(torch.minimum(p, q).sum())


def by_inverse(p: Tensor, q: Tensor) -> float:
    """The chance that a number lies in the stretches that a token has in both."""
    ends = [torch.cat((torch.zeros(1, dtype=torch.float64), x.double().cumsum(0))) for x in (p, q)]
    low, high = torch.maximum(ends[0][:-1], ends[1][:-1]), torch.minimum(ends[0][1:], ends[1][1:])
    return float((high - low).clamp(min=0).sum())


def by_gumbel(p: Tensor, q: Tensor) -> float:
    """The sum over i of 1 / sum_j max(p_j / p_i, q_j / q_i)."""
    p, q = p.double(), q.double()
    return float((1 / torch.maximum(p[None] / p[:, None], q[None] / q[:, None]).sum(1)).sum())


def agreeing(p: Tensor, q: Tensor, coupling: Coupling, draws: int = DRAWS) -> float:
    return sum(pick(p, number(i), coupling) == pick(q, number(i), coupling) for i in range(draws)) / draws


def two(vocab: int, sharp: float = 3.0, noise: float = 0.5, seed: int = 0) -> tuple[Tensor, Tensor]:
    """What a target and a draft model might say: logits that differ by noise."""
    gen = torch.Generator().manual_seed(seed)
    logits = torch.randn(vocab, generator=gen) * sharp
    return logits.softmax(-1), (logits + torch.randn(vocab, generator=gen) * noise).softmax(-1)


@pytest.mark.parametrize("seed", range(2))
def test_agreement_is_the_closed_form(seed: int) -> None:
    p, q = two(400, seed=seed)
    assert agreeing(p, q, "gumbel") == pytest.approx(by_gumbel(p, q), abs=0.035)
    assert agreeing(p, q, "inverse") == pytest.approx(by_inverse(p, q), abs=0.035)
    best = bound(p, q)
    assert best / (2 - best) <= by_gumbel(p, q) <= best and by_inverse(p, q) < by_gumbel(p, q)


def test_a_large_vocabulary() -> None:
    """Of 49,152 tokens: 0.81 can agree at most, 0.78 do by Gumbel noise; stretches of many small tokens drift apart."""
    p, q = two(VOCAB)
    assert bound(p, q) == pytest.approx(0.813, abs=0.002)
    assert agreeing(p, q, "gumbel", 600) == pytest.approx(0.78, abs=0.04)
    assert by_inverse(p, q) < 0.3


# ---- through the engine
PROMPTS = tiny.prompts(*[30, 7, 55] * 8)
PARAMS = [Params(max_tokens=40, temperature=0.9, seed=seed, ignore_eos=True) for seed in range(24)]


@cache
def said(sample: str, draft: str = "", verify: str = "match") -> tuple[list[list[int]], int, int]:
    """What all requests say, and how many guesses were made and accepted."""
    verbs = {"sample": sample} | ({"draft": draft, "verify": verify} if draft else {})
    placed = tiny.engine(verbs)
    outs = tiny.outs(tiny.run(placed, PROMPTS, PARAMS))
    placed.close()
    return outs, placed.counters.drafted, placed.counters.accepted


def drafts() -> dict[str, str]:
    model = relative(0.02)
    return {"draft_model": f"draft_model:model={model},k=3", "pearl": f"pearl:model={model},k=3,where=inline"}


@pytest.mark.parametrize("sample", [GUMBEL, f"grammar:then=({GUMBEL})"])
@pytest.mark.parametrize("name", ["draft_model", "pearl"])
def test_matched_tokens_are_plain_decodings_and_more_guesses_are_accepted(name: str, sample: str) -> None:
    outs, drafted, accepted = said(sample, drafts()[name])
    assert outs == said(GUMBEL)[0] != said("standard")[0]
    _, before, fewer = said("standard", drafts()[name])
    assert accepted / drafted > fewer / before + 0.03


def test_rejection_accepts_as_before() -> None:
    """Its verdicts need no coupling."""
    _, drafted, accepted = said(GUMBEL, drafts()["draft_model"], "rejection")
    _, before, as_many = said("standard", drafts()["draft_model"], "rejection")
    assert accepted / drafted == pytest.approx(as_many / before, abs=0.1)


def test_greedy_requests_draw_nothing() -> None:
    params = [replace(each, temperature=0.0) for each in PARAMS]
    outs = [tiny.outs(tiny.run(tiny.engine({"sample": sample}), PROMPTS, params)) for sample in (GUMBEL, "standard")]
    assert outs[0] == outs[1]


def test_a_coupling_that_nobody_knows() -> None:
    with pytest.raises(UserError, match="choose one of inverse, gumbel"):
        parse({"sample": "standard:coupling=best"})
    with pytest.raises(UserError, match="must be inverse or gumbel"):
        Standard("best")  # type: ignore[arg-type]
