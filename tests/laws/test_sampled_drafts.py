"""Law 4 for drafts under verifiers whose tokens hang on the guesses: whatever the load, the same guesses are made.

A guess that was drawn uses up random numbers, and so does a lossy verifier's leniency: were they cut to what a
scheduler grants, left out for want of memory, or put off by a preemption, a request's tokens would depend on its mates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest

from phasewise import catalog
from phasewise.builder import Builder
from phasewise.engine.engine import Engine
from phasewise.engine.limits import Limits
from phasewise.methods.decode.speculative import Speculative
from phasewise.options import parse
from phasewise.request.params import Params
from phasewise.request.request import Request
from phasewise.verbs.draft import Draft
from phasewise.verbs.place import Placed
from phasewise.verbs.sample import Dist
from phasewise.verbs.verify import Random
from tests import tiny
from tests.laws.settings import spell, tight

N = 24
PROMPTS = tiny.prompts(50, 7, 110, 60)
PROMPTS[3] = PROMPTS[3][:15] * 4  # something to look up
PARAMS = [Params(max_tokens=N, ignore_eos=True, temperature=0.9, top_p=0.95, seed=seed) for seed in range(4)]
SCHEDULES = [spell("schedule", name, tight("schedule", name)) for name in catalog.names("schedule")]
DRAFTS = {name: spell("draft", name, tight("draft", name)) for name in catalog.names("draft")} | {
    "draft_model chunks": "draft_model:model=tiny-draft,k=3,chunk=16",  # it lags behind long prompts for some steps
    "draft_model tree": "draft_model:model=tiny-draft,k=3,branches=3",
    "prompt_lookup tree": "prompt_lookup:min_match=1,branches=2",
}
FORGETFUL = {  # what they have learned of a request is lost with all else in a preemption, and shapes their guesses
    (draft, "lax") for draft in ("lookahead", "prompt_lookup", "token_recycling")
}


@dataclass(frozen=True)
class Lax:
    """Accepts every guess whose token is at all likely: lossy, and different for other guesses."""

    guarantee = "lossy"

    def __call__(self, draft: Draft, p: Dist, rng: Random) -> tuple[list[int], int]:
        path: list[int] = []
        while True:
            node = path[-1] if path else -1
            row = p.row(node + 1)
            likely = [c for c in draft.children(node) if float(row[draft.tokens[c]]) > 0.02]
            if not likely:
                return path, p.draw(node + 1, rng(len(path), 0))
            path.append(likely[0])


VERIFIERS: dict[str, Callable[[], Any]] = {name: lambda name=name: catalog.build("verify", name)
                                           for name in catalog.names("verify")} | {"lax": Lax}  # fmt: skip


def speculating(draft: str, verify: str, schedule: str = "prefill_first", **limits: Any) -> Engine:
    methods = parse({"draft": DRAFTS[draft], "schedule": schedule})
    methods["decode"] = Speculative(methods["draft"], VERIFIERS[verify]())
    placed = Builder(tiny.model(), methods, Limits(**{"kv_bytes": 64 << 20, **limits}), load=tiny.load).build()
    assert isinstance(placed, Engine)
    return placed


@cache
def alone(draft: str, verify: str) -> list[list[int]]:
    """Each request by itself, with all the rows and memory it wants."""
    return [
        tiny.outs(tiny.run(speculating(draft, verify), [prompt], params))[0] for prompt, params in zip(PROMPTS, PARAMS)
    ]


PAIRS = [(draft, verify) for draft in DRAFTS for verify in VERIFIERS]
LASTING = [(draft, verify) for draft, verify in PAIRS if (draft.partition(" ")[0], verify) not in FORGETFUL]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("draft", "verify"), PAIRS, ids=map("-".join, PAIRS))
def test_schedulers_change_nothing(draft: str, verify: str, schedule: str) -> None:
    placed = speculating(draft, verify, schedule)
    assert tiny.outs(tiny.run(placed, PROMPTS, PARAMS)) == alone(draft, verify)


@pytest.mark.parametrize(("draft", "verify"), LASTING, ids=map("-".join, LASTING))
def test_preemption_changes_nothing(draft: str, verify: str) -> None:
    """Whoever lost all KV and the drafter's computes it again, and then guesses where it would have guessed."""
    for moment in (1, 2, 3, 5, 8):
        placed = speculating(draft, verify, "sarathi:budget=40")
        requests = [Request(prompt, params) for prompt, params in zip(PROMPTS, PARAMS)]
        for request in requests:
            placed.add(request)
        for step in range(3 * moment):
            if step % moment == moment - 1:
                for request in placed.running[1:]:
                    placed.room.preempt(request)
            placed.step()
        tiny.finish(placed, requests)
        assert placed.counters.preemptions > 0
        assert tiny.outs(requests) == alone(draft, verify)


@pytest.mark.parametrize(("draft", "verify"), LASTING, ids=map("-".join, LASTING))
def test_memory_changes_nothing(draft: str, verify: str) -> None:
    """With room for two requests and a half, whoever comes last makes way: for rows, and for drafts that must be."""
    slab = speculating(draft, verify).recipes[""].need(1)  # the drafter's included
    placed = speculating(draft, verify, "splitfuse:budget=5", kv_bytes=5 * slab)
    got = tiny.outs(tiny.run(placed, PROMPTS * 2, PARAMS * 2))
    assert got == alone(draft, verify) * 2
    assert placed.counters.preemptions > 0, "nobody was short of memory"


@pytest.mark.parametrize(("draft", "verify"), PAIRS, ids=map("-".join, PAIRS))
def test_prefix_hits_change_nothing(draft: str, verify: str) -> None:
    placed = speculating(draft, verify)
    for _ in range(2):
        assert tiny.outs([serve(placed, p, q) for p, q in zip(PROMPTS, PARAMS)]) == alone(draft, verify)
    assert placed.counters.prefix_hits > 0


def serve(placed: Placed, prompt: Sequence[int], params: Params) -> Request:
    request = Request(prompt, params)
    placed.add(request)
    while request.left is None:
        placed.step()
    return request
