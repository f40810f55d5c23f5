"""Greedy tokens are plain decoding's under every drafter, verifier, tree, schedule and memory; and the KV is too."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from phasewise import catalog
from phasewise.request.params import Params
from phasewise.request.request import Request
from phasewise.verbs.place import Placed
from tests import tiny
from tests.laws import scenario
from tests.laws.settings import spell

N = 16
VERIFIERS = [name for name in catalog.names("verify") if catalog.method("verify", name).guarantee != "lossy"]
DRAFTERS = {
    **{name: spell("draft", name) for name in catalog.names("draft")},
    "prompt_lookup tree": "prompt_lookup:min_match=1,branches=3",
    "draft_model tree": "draft_model:model=tiny-draft,branches=4,k=3",
    "perfect chain": "draft_model:model=tiny",
    "perfect tree": "draft_model:model=tiny,branches=2",
}
OWN = ("prompt_lookup tree", "draft_model tree", "perfect chain", "perfect tree")  # settings that no law has
PAIRS = sorted({*((draft, "rejection") for draft in OWN), *(("draft_model tree", verify) for verify in VERIFIERS)})


def prompts() -> list[list[int]]:
    texts = tiny.prompts(30, 7, 90, 1, 12)
    texts[4] = texts[4] * 4  # something to look up
    return texts


@cache
def plain() -> list[list[int]]:
    return tiny.plain(prompts(), tiny.greedy(N))


def speculating(draft: str, verify: str = "rejection", **limits: int) -> Placed:
    return tiny.engine({"draft": DRAFTERS[draft], "verify": verify}, **limits)


@pytest.mark.parametrize(("draft", "verify"), PAIRS, ids=[f"{d}-{v}" for d, v in PAIRS])
def test_tokens_are_plain_decodings(draft: str, verify: str) -> None:
    placed = speculating(draft, verify)
    requests = tiny.run(placed, prompts(), tiny.greedy(N))
    assert tiny.outs(requests) == plain()
    assert placed.counters.drafted >= placed.counters.accepted
    assert placed.counters.emitted == N * len(requests)


@pytest.mark.parametrize(("draft", "verify"), zip(OWN, ["match", "rejection", "rejection", "match"]))
def test_tokens_are_a_requests_own(draft: str, verify: str) -> None:
    scenario.check({"draft": DRAFTERS[draft], "verify": verify}, "sarathi:budget=9")


@pytest.mark.parametrize("draft", ["perfect chain", "perfect tree", "prompt_lookup tree"])
@pytest.mark.parametrize("at", range(2, 9))
def test_a_stop_token_inside_an_accepted_run_ends_there(draft: str, at: int) -> None:
    prompt, want = next((p, out[:at]) for p, out in zip(prompts(), plain()) if out[at - 1] not in out[: at - 1])
    placed = speculating(draft)
    request = tiny.run(placed, [prompt], Params(max_tokens=N, ignore_eos=True, stop_tokens=(want[-1],)))[0]
    assert request.out == want and request.left is not None and request.left.reason == "stop"


@pytest.mark.parametrize("draft", ["perfect chain", "perfect tree"])
@pytest.mark.parametrize("n", range(1, 9))
def test_never_more_than_max_tokens(draft: str, n: int) -> None:
    placed = speculating(draft)
    request = tiny.run(placed, prompts()[:1], tiny.greedy(n))[0]
    assert request.out == plain()[0][:n]
    assert placed.counters.rows <= request.prompt_len + 2 * n, "rows that could never be emitted were computed"


@pytest.mark.parametrize("draft", [*OWN, "draft_model", "suffix_decoding", "token_recycling", "swift"])
def test_kv_after_every_step_is_plain_decodings(draft: str) -> None:
    """After chains and trees alike, rows 0 .. computed-1 stand in order, with the keys an ordinary run computes."""
    reference, placed = tiny.engine(), speculating(draft)
    request, plainly = Request(prompts()[4], tiny.greedy(N)), Request(prompts()[4], tiny.greedy(N))
    placed.add(request)
    reference.add(plainly)
    while plainly.n_out < N - 1:
        reference.step()
    assert plainly.kv is not None
    while request.left is None:
        placed.step()
        if request.kv is None:
            break
        for ours, theirs in zip(request.kv.layers, plainly.kv.layers):
            (slab,), (want,) = ours.slabs, theirs.slabs
            assert slab.positions is None and slab.n == request.computed
            rows = min(slab.n, want.n)
            for plane, expected in zip(slab.buffer.planes, want.buffer.planes):
                torch.testing.assert_close(plane[:, :rows], expected[:, :rows], atol=1e-4, rtol=1e-4)
    assert request.out == plain()[4]


def test_trees_do_accept_later_siblings() -> None:
    """Otherwise the tests above would not have seen a path that must be moved together."""
    placed = speculating("draft_model tree")
    before = tiny.engine()
    for engine in (placed, before):
        tiny.run(engine, prompts(), tiny.greedy(N))
    assert placed.counters.accepted > 0
    assert placed.counters.kv_bytes_moved > before.counters.kv_bytes_moved
