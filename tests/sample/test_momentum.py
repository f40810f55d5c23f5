"""Momentum decoding: counts of repeats against an exhaustive search, and what a chain of sample methods promises."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from phasewise import catalog
from phasewise.errors import UserError
from phasewise.methods.sample.momentum import LONGEST, Grams, Momentum
from phasewise.methods.sample.standard import Standard
from phasewise.options import lossy, parse, spell
from phasewise.request.params import Params
from phasewise.request.request import Request
from phasewise.verbs.sample import Context
from tests import tiny

FEW = st.lists(st.integers(0, 3), max_size=12)


def repeats(text: Sequence[int], token: int) -> int:
    """By looking everywhere."""
    said = [*text, token]
    for n in range(LONGEST, 0, -1):
        if len(said) > n and any(said[i : i + n] == said[-n:] for i in range(len(said) - n)):
            return n
    return 0


@given(FEW, FEW, FEW, st.integers(0, 4))
def test_repeats_are_those_of_an_exhaustive_search(
    first: list[int], more: list[int], path: list[int], token: int
) -> None:
    grams = Grams()
    grams.roll(first)
    grams.roll(first + more)  # rolled forward, in pieces
    assert grams.repeats(first + more, path, token) == repeats([*first, *more, *path], token)


def test_scores_are_the_papers() -> None:
    """p - alpha * f over the k likeliest; the others are out."""
    request = Request([1, 2, 3, 1, 2], Params())
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0, 2.5, -1.0]])
    probs = logits.softmax(-1)[0]
    dist = catalog.build("sample", "momentum:k=3,alpha=0.2")
    scored = logits.clone()
    runtime = dist.bind(tiny_host())
    runtime(scored, [Context(request)])
    assert scored[0, 3] == pytest.approx(float(probs[3]) - 0.2 * 3)  # 1 2 3 was said
    assert scored[0, 4] == pytest.approx(float(probs[4]))  # 4 is new
    assert scored[0, 2] == pytest.approx(float(probs[2]) - 0.2)  # 2 was, but not after 2
    assert scored[0, [0, 1, 5]].tolist() == [float("-inf")] * 3


def tiny_host() -> object:
    class Host:
        def bind(self, method: Any) -> Any:
            return method

    return Host()


def test_long_repeats_end_and_alpha_zero_is_greedy() -> None:
    prompts = tiny.prompts(40, 9)
    plain = tiny.outs(tiny.run(tiny.engine(), prompts, tiny.greedy(40)))
    assert tiny.outs(tiny.run(tiny.engine({"sample": "momentum:alpha=0"}), prompts, tiny.greedy(40))) == plain
    heavy = tiny.outs(tiny.run(tiny.engine({"sample": "momentum:alpha=9"}), prompts, tiny.greedy(40)))
    assert heavy != plain
    for prompt, out in zip(prompts, heavy):
        whole = prompt + out
        runs = [tuple(whole[i : i + 6]) for i in range(len(whole) - 5)]
        assert len(set(runs)) == len(runs), "six tokens were said again"


@pytest.mark.parametrize("draft", ["prompt_lookup:k=4", "token_recycling", "draft_model:model=tiny-draft,k=3"])
def test_drafts_change_no_token(draft: str) -> None:
    prompts = tiny.prompts(40, 9)
    want = tiny.outs(tiny.run(tiny.engine({"sample": "momentum"}), prompts, tiny.greedy(30)))
    assert tiny.outs(tiny.run(tiny.engine({"sample": "momentum", "draft": draft}), prompts, tiny.greedy(30))) == want


def test_sampled_requests_are_drawn_as_without_it() -> None:
    params = Params(max_tokens=20, ignore_eos=True, temperature=1.0, seed=3)
    want = tiny.outs(tiny.run(tiny.engine(), tiny.prompts(20), params))
    assert tiny.outs(tiny.run(tiny.engine({"sample": "momentum:alpha=9"}), tiny.prompts(20), params)) == want


# ---- chains
def test_a_chain_is_its_methods_in_order() -> None:
    chain = catalog.build("sample", "momentum:k=3 + momentum:alpha=0.5+standard")
    assert chain == Momentum(k=3, then=Momentum(alpha=0.5, then=Standard()))
    assert [type(each).__name__ for each in catalog.chain_of(chain)] == ["Momentum", "Momentum", "Standard"]
    text = spell(parse({"sample": "momentum:k=3+momentum:alpha=0.5"}))["sample"]
    assert catalog.build("sample", text) == chain
    assert catalog.build("sample", "momentum:alpha=1e+1").alpha == 10.0, "no chain: a number"


@pytest.mark.parametrize(
    ("text", "why"),
    [("standard+momentum", "must come last, as in momentum\\+standard"),
     ("momentum+nothing", "nothing"), ("momentum+", "momentum"), ("+momentum", "sample")],
)  # fmt: skip
def test_chains_that_are_none(text: str, why: str) -> None:
    with pytest.raises(UserError, match=why):
        parse({"sample": text})


def test_a_lossy_method_within_a_chain_is_lossy() -> None:
    assert lossy(parse({"sample": "grammar+momentum"})) == ["sample=momentum (or say momentum:alpha=0.0)"]
    assert lossy(parse({"sample": "grammar"})) == []


def test_other_verbs_have_no_chains() -> None:
    with pytest.raises(UserError, match="prompt_lookup\\+x"):
        catalog.known("draft", "prompt_lookup+x")
