"""Contrastive decoding against its slow twin, and the amateur's life beside the request's."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from phasewise import catalog
from phasewise.errors import UserError
from phasewise.methods.decode.contrastive import Contrastive, contrast
from phasewise.request.params import Params
from phasewise.request.request import Request
from tests import tiny
from tests.decode.slow import Contrast

N = 14
SAMPLED = Params(max_tokens=N, ignore_eos=True, temperature=0.8, seed=4)


def engine(knobs: str = "", schedule: str | None = None, **limits: Any) -> Any:
    text = "contrastive:amateur=tiny-draft" + ("," + knobs if knobs else "")
    return tiny.engine({"decode": text} | ({"schedule": schedule} if schedule else {}), **limits)


def alone(prompt: list[int], params: Params, knobs: str = "") -> list[int]:
    return tiny.outs(tiny.run(engine(knobs), [prompt], params))[0]


@pytest.mark.parametrize("params", [tiny.greedy(N), SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize(
    ("alpha", "beta", "temperature"), [(0.1, 0.5, 1.0), (0.0, 2.0, 1.0), (0.3, 1.0, 0.5), (1.0, 9.0, 1.0)]
)
def test_equals_full_recomputation(alpha: float, beta: float, temperature: float, params: Params) -> None:
    slow = Contrast(tiny.model(), tiny.load("tiny-draft"), alpha, beta, temperature)
    placed = engine(f"alpha={alpha},beta={beta},temperature={temperature}", schedule="sarathi:budget=24")
    for request in tiny.run(placed, tiny.prompts(41, 7, 1), params):
        want, gaps = slow.run(request.prompt, params)
        at = next((i for i, (a, b) in enumerate(zip(request.out, want)) if a != b), None)
        assert at is None or gaps[at] < 1e-4, (request.out, want)


def test_the_amateur_makes_a_difference_and_implausible_tokens_none() -> None:
    prompts = tiny.prompts(41, 7, 90)
    plain = tiny.plain(prompts, tiny.greedy(N))
    assert [alone(p, tiny.greedy(N), "beta=3.0") for p in prompts] != plain
    assert [alone(p, tiny.greedy(N), "beta=3.0,alpha=1.0") for p in prompts] == plain  # only the best is plausible


def test_neutral_draws_what_plain_decoding_draws() -> None:
    prompts = tiny.prompts(41, 7, 90, 1)
    want = tiny.plain(prompts, SAMPLED)
    assert tiny.outs(tiny.run(engine("beta=0,alpha=0"), prompts, SAMPLED)) == want


def test_shaped_logits_on_paper() -> None:
    expert, amateur = torch.tensor([[0.5, 0.3, 0.2]]).log(), torch.tensor([[0.8, 0.1, 0.1]]).log()
    shaped = contrast(expert, amateur, Contrastive(alpha=0.5, beta=1.0))
    want = torch.tensor([[0.25 / 0.8, 0.09 / 0.1, 0.0]])
    torch.testing.assert_close(shaped.softmax(-1), want / want.sum())


def test_the_amateur_reads_every_row_once_and_in_the_same_slices() -> None:
    placed = engine(schedule="sarathi:budget=16", prefix_cache=False)
    amateur = placed.recipes[""].companions[0]
    request = Request(tiny.prompts(100)[0], tiny.greedy(N))
    placed.add(request)
    while request.left is None:
        before = amateur.own.rows
        placed.step()
        assert amateur.own.rows - before <= 16
        assert amateur.own.rows == placed.counters.rows
    assert placed.counters.draft_forwards == placed.counters.forwards


def test_the_amateurs_kv_counts_and_goes_back() -> None:
    placed = engine(prefix_cache=False)
    request = Request(tiny.prompts(70)[0], tiny.greedy(N))
    placed.add(request)
    for _ in range(3):
        placed.step()
    amateur = placed.recipes[""].companions[0]
    assert request.kv is not None
    assert placed.kv_bytes == request.kv.bytes + request.state["contrastive"].kv.bytes
    assert request.state["contrastive"].kv.bytes == amateur.store.cost(70 + 3)
    placed.cancel(request)
    assert placed.kv_bytes == 0


def test_the_amateur_is_rebuilt_after_a_preemption() -> None:
    prompt = tiny.prompts(41)[0]
    for params in (tiny.greedy(N), SAMPLED):
        want = alone(prompt, params)
        for moment in (1, 2, 7, 12):
            placed, request = engine(schedule="sarathi:budget=24"), Request(prompt, params)
            placed.add(request)
            for _ in range(moment):
                placed.step()
            placed.room.preempt(request)
            assert not request.state
            tiny.finish(placed, [request])
            assert request.out == want


def test_siblings_share_the_amateurs_prompt() -> None:
    prompt = tiny.prompts(50)[0]
    placed = engine(prefix_cache=False)
    first = Request(prompt, SAMPLED)
    family = [first, first.sibling(1), first.sibling(2)]
    for request in family:
        placed.add(request)
    tiny.finish(placed, family)
    assert placed.recipes[""].companions[0].own.rows == 50 + 3 * (N - 1)
    for request in family:
        assert request.out == alone(prompt, request.params)


def test_another_vocabulary_is_refused() -> None:
    other = tiny.checkpoint(vocab=32)
    with pytest.raises(UserError, match="has 32 token ids, but the model has 64"):
        tiny.engine({"decode": f"contrastive:amateur={other}"})


@pytest.mark.parametrize("knobs", ["alpha=1.5", "alpha=-0.1", "beta=-1", "beta=inf", "temperature=0"])
def test_wrong_knobs_are_named(knobs: str) -> None:
    with pytest.raises(UserError, match=knobs.partition("=")[0]):
        catalog.build("decode", f"contrastive:{knobs}")
