"""Law 4 for drafts under verifiers whose tokens hang on the guesses: whatever the load, the same guesses are made.

A guess that was drawn uses up random numbers, and so does a lossy verifier's leniency: were they cut to what a
scheduler grants, left out for want of memory, or put off by a preemption, a request's tokens would depend on its mates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import pytest

from phasewise import catalog
from phasewise.builder import Builder
from phasewise.engine.engine import Engine
from phasewise.engine.limits import Limits
from phasewise.errors import UserError
from phasewise.methods.decode.speculative import Speculative
from phasewise.options import parse
from phasewise.request.params import Params
from phasewise.request.request import Request
from phasewise.verbs.draft import Draft
from phasewise.verbs.method import Method
from phasewise.verbs.place import Placed
from phasewise.verbs.sample import Dist
from phasewise.verbs.traits import Traits
from phasewise.verbs.verify import Random
from tests import tiny
from tests.laws import axes
from tests.laws.settings import spell, tight

N = 24
PROMPTS = tiny.prompts(50, 7, 110, 60)
PROMPTS[3] = PROMPTS[3][:15] * 4  # something to look up
PARAMS = [Params(max_tokens=N, ignore_eos=True, temperature=0.9, top_p=0.95, seed=seed) for seed in range(4)]
SCHEDULES = [spell("schedule", name, tight("schedule", name)) for name in catalog.names("schedule")]
DRAFTS = {name: spell("draft", name, tight("draft", name)) for name in catalog.names("draft")} | {
    "draft_model chunks": "draft_model:model=tiny-draft,k=3,chunk=16",  # it lags behind long prompts for some steps
    "draft_model tree": "draft_model:model=tiny-draft,k=3,branches=3",
    "pearl drawn": "pearl:model=tiny-draft,k=3,where=inline,judged=drawn",
    "prompt_lookup tree": "prompt_lookup:min_match=1,branches=2",
    "specdec calibrated": "specdec:model=tiny-draft,stop=calibrated,threshold=0.9,most=4",
}
LEARNING = ("aded", "diffuspec", "lookahead", "masked_mtp", "paced", "ppd", "prompt_lookup", "token_recycling")
# what they have learned of a request is lost with all else in a preemption, and shapes their guesses
FORGETFUL = {(draft, "lax") for draft in (*LEARNING, "specdec calibrated")}
FORGETFUL |= {("specdec calibrated", verify) for verify in catalog.names("verify")}


@dataclass(frozen=True)
class Lax(Method):
    """Accepts every guess whose token is at all likely: lossy, and different for other guesses."""

    guarantee: ClassVar[str] = "lossy"
    traits: ClassVar[Traits] = Traits("verify")

    def __call__(self, draft: Draft, p: Dist, rng: Random) -> tuple[list[int], int]:
        path: list[int] = []
        while True:
            node = path[-1] if path else -1
            row = p.row(node + 1)
            likely = [c for c in draft.children(node) if float(row[draft.tokens[c]]) > 0.02]
            if not likely:
                return path, p.draw(node + 1, rng(len(path), 0))
            path.append(likely[0])


VERIFIERS: dict[str, Callable[[], Any]] = {name: lambda name=name: catalog.build("verify", spell("verify", name))
                                           for name in catalog.names("verify")} | {"lax": Lax}  # fmt: skip


def speculating(draft: str, verify: str, schedule: str = "prefill_first", **limits: Any) -> Engine:
    methods = parse({"draft": DRAFTS[draft], "schedule": schedule})
    methods["decode"] = Speculative(methods["draft"], VERIFIERS[verify]())
    placed = Builder(tiny.model(), methods, Limits(**{"kv_bytes": 64 << 20, **limits}), load=tiny.load).build()
    assert isinstance(placed, Engine)
    return placed


LOSSY = [verify for verify in VERIFIERS if VERIFIERS[verify]().traits.matches == "none"]
REFUSING = {  # drafters that refuse lossy verifiers, and why
    "swift": "learns from all requests",
    "hidden_transfer": "begins to compute its guesses",
    "kangaroo": "begins to compute its guesses",
}
REFUSED = {(draft, verify): why for draft, why in REFUSING.items() for verify in LOSSY}


@cache
def alone(draft: str, verify: str) -> list[list[int]]:
    """Each request by itself, with all the rows and memory it wants."""
    return [
        tiny.outs(tiny.run(speculating(draft, verify), [prompt], params))[0] for prompt, params in zip(PROMPTS, PARAMS)
    ]


PAIRS = [(draft, verify) for draft in DRAFTS for verify in VERIFIERS if (draft, verify) not in REFUSED]
HARDEST = ("lax", "rejection")  # no token hangs on the guesses' being made less; only those of drawn ones do
Pair = tuple[str, str]


def pairs(whole: bool) -> list[Pair]:
    """Every drafter under the verifiers that ask most of it, every verifier over a draft model; or all pairs."""
    return [pair for pair in PAIRS if whole or pair[0] == "draft_model" or pair[1] in HARDEST]


def lasting(whole: bool) -> list[Pair]:
    return [pair for pair in pairs(whole) if not {pair, (pair[0].partition(" ")[0], pair[1])} & FORGETFUL]


def scheduled(whole: bool) -> list[tuple[str, str, str]]:
    """All pairs under all schedulers; or every drafter under two of them, schedulers and verifiers in turn."""
    if whole:
        return [(*pair, schedule) for pair in PAIRS for schedule in SCHEDULES]
    met = axes.turns([*DRAFTS], SCHEDULES, False, each=len(HARDEST))
    found = [(draft, HARDEST[i % len(HARDEST)], schedule) for i, (draft, schedule) in enumerate(met)]
    found += [("draft_model", verify, SCHEDULES[0]) for verify in VERIFIERS if verify not in HARDEST]
    return [case for case in found if case[:2] not in REFUSED]


@axes.over(lambda whole: sorted(REFUSED), "-".join)
def test_what_others_said_or_left_room_for_may_change_no_token(case: Pair) -> None:
    with pytest.raises(UserError, match=REFUSED[case]):
        speculating(*case)


@axes.over(scheduled, "-".join, most=12)
def test_schedulers_change_nothing(case: tuple[str, str, str]) -> None:
    draft, verify, schedule = case
    placed = speculating(draft, verify, schedule)
    assert tiny.outs(tiny.run(placed, PROMPTS, PARAMS)) == alone(draft, verify)


@axes.over(lasting, "-".join, most=8)
def test_preemption_changes_nothing(case: Pair) -> None:
    """Whoever lost all KV and the drafter's computes it again, and then guesses where it would have guessed."""
    draft, verify = case
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


@axes.over(lasting, "-".join, most=8)
def test_memory_changes_nothing(case: Pair) -> None:
    """With room for two requests and a half, whoever comes last makes way: for rows, and for drafts that must be."""
    draft, verify = case
    slab = speculating(draft, verify).recipes[""].need(1)  # the drafter's included
    placed = speculating(draft, verify, "splitfuse:budget=5", kv_bytes=5 * slab)
    got = tiny.outs(tiny.run(placed, PROMPTS * 2, PARAMS * 2))
    assert got == alone(draft, verify) * 2
    assert placed.counters.preemptions > 0, "nobody was short of memory"


@axes.over(pairs, "-".join, most=8)
def test_prefix_hits_change_nothing(case: Pair) -> None:
    draft, verify = case
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
