"""Draws: the right frequencies, the same tokens in any batch and schedule, and distributions that can be cut."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from phasewise.methods.sample.standard import Standard
from phasewise.request.params import Params
from phasewise.request.request import Request
from phasewise.verbs.sample import Context, Dist, Purpose, draw, pick, uniform
from tests import tiny
from tests.lazy import lazy

stats: Any = lazy("scipy.stats")


def test_pick_inverts_the_cumulated_probabilities() -> None:
    probs = torch.tensor([0.0, 0.25, 0.0, 0.5, 0.25, 0.0])
    assert [pick(probs, u) for u in (0.0, 0.2499, 0.25, 0.7499, 0.75, 0.999999)] == [1, 1, 3, 3, 4, 4]
    assert [pick(probs * 8, u) for u in (0.0, 0.3, 0.9)] == [1, 3, 4], "weights need not be normalised"


def test_pick_never_takes_what_has_no_weight() -> None:
    """Not even for the largest number that `uniform` can give."""
    largest = (2**53 - 1) / 2**53
    gen = torch.Generator().manual_seed(0)
    for _ in range(300):
        probs = torch.rand(50, generator=gen) * (torch.rand(50, generator=gen) < 0.3)
        probs[7] = 1e-7
        for u in (0.0, largest):
            assert probs[pick(probs, u)] > 0


def test_frequencies_follow_the_probabilities() -> None:
    probs = np.array([0.5, 0.2, 0.15, 0.1, 0.05])
    n = 10_000
    request_of = [Request([0, 1], Params(temperature=1.0, seed=seed)) for seed in range(n)]
    contexts = [Context(request) for request in request_of]
    logits = torch.tensor(np.log(probs), dtype=torch.float32).repeat(n, 1)
    tokens = draw(Standard()(logits, contexts), contexts)
    counts = np.bincount(tokens, minlength=5)
    assert stats.chisquare(counts, probs * n).pvalue > 1e-3
    wrong = np.array([0.45, 0.25, 0.15, 0.1, 0.05])
    assert stats.chisquare(counts, wrong * n).pvalue < 1e-6, "the test must be able to fail"


def test_draw_all_equals_draw_and_pick() -> None:
    gen = torch.Generator().manual_seed(1)
    logits = torch.randn(6, 9, generator=gen)
    contexts = [Context(Request([1], Params(temperature=float(i % 3), seed=i))) for i in range(6)]
    dist = Standard()(logits, contexts)
    us = [uniform(i, 1, Purpose.SAMPLE) for i in range(6)]
    tokens = dist.draw_all(us)
    assert tokens == [dist.draw(i, u) for i, u in enumerate(us)]
    for i in range(6):
        assert dist.greedy(i) == (i % 3 == 0)
        assert tokens[i] == (int(logits[i].argmax()) if dist.greedy(i) else pick(dist.row(i), us[i]))
        assert float(dist.row(i)[tokens[i]]) > 0


def test_parts_of_a_distribution() -> None:
    gen = torch.Generator().manual_seed(2)
    params = [Params(), Params(temperature=1.0), Params(temperature=0.5), Params(), Params(temperature=2.0)]
    dist = Standard()(torch.randn(5, 7, generator=gen), [Context(Request([1], p)) for p in params])
    for start in range(5):
        for end in range(start + 1, 6):
            part = dist.part(start, end)
            assert len(part) == end - start
            for i in range(end - start):
                assert part.greedy(i) == dist.greedy(start + i)
                assert torch.equal(part.row(i), dist.row(start + i))
                assert part.draw(i, 0.4) == dist.draw(start + i, 0.4)
            assert part.draw_all([0.4] * len(part)) == dist.draw_all([0.4] * 5)[start:end]


def test_a_greedy_distribution_is_a_point() -> None:
    dist = Dist([3, 1], 5)
    assert dist.row(0).tolist() == [0, 0, 0, 1, 0]
    assert dist.row(1).tolist() == [0, 1, 0, 0, 0]


SAMPLED = [
    Params(max_tokens=12, temperature=0.9, seed=1, ignore_eos=True),
    Params(max_tokens=12, temperature=1.5, top_k=20, seed=2, ignore_eos=True),
    Params(max_tokens=12, temperature=0.7, top_p=0.9, frequency_penalty=0.5, seed=3, ignore_eos=True),
    Params(max_tokens=12, repetition_penalty=1.3, ignore_eos=True),
    Params(max_tokens=12, temperature=1.0, presence_penalty=1.0, logit_bias={9: 3.0}, seed=5, ignore_eos=True),
]


def test_siblings_keep_their_own_counts() -> None:
    """Penalties of n samples of one prompt, and of a request forked in mid-flight, are those of separate requests."""
    prompt, params = tiny.prompts(20)[0], SAMPLED[2]
    placed = tiny.engine()
    first = Request(prompt, params)
    family = [first, first.sibling(1), first.sibling(2)]
    for request in family:
        placed.add(request)
    while first.n_out < 6:
        placed.step()
    twin = Request(prompt, params)
    twin.adopt(first)
    placed.resume(twin)
    tiny.finish(placed, [*family, twin])
    for request in (*family, twin):
        assert request.out == tiny.outs(tiny.run(tiny.engine(), [prompt], request.params))[0]


def test_seeds_matter() -> None:
    prompt, params = tiny.prompts(10), SAMPLED[0]
    runs = [tiny.outs(tiny.run(tiny.engine(), prompt, replace(params, seed=s)))[0] for s in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]
