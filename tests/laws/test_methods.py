"""The laws of DESIGN section 4, over every discovered method. A new method file is under them at once.

Each law takes every method under one scheduler, another for each law, so that all meet (`--all-pairs`: all under all).
What a method gives alone, one whole prompt at a time, is what it has to give under any scheduler, whatever happens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import pytest

from phasewise import catalog
from phasewise.request.params import Params
from phasewise.request.request import Request
from phasewise.speculation.loop import matches
from phasewise.verbs.place import Placed
from tests import oracle, tiny
from tests.laws import axes
from tests.laws.axes import Single
from tests.laws.compare import Reference, reference
from tests.laws.engines import preempt
from tests.laws.settings import discovered, guarantee, options, slow

EVERY = discovered()
IDS = [f"{verb}.{name}" for verb, name in EVERY]
LENGTHS = (41, 7, 90, 1)
N = 14
PARAMS = {
    "greedy": tiny.greedy(N),
    "sampled": Params(max_tokens=N, ignore_eos=True, temperature=0.8, top_p=0.95, seed=11),
}
LAWS = ["exact or biting", "mates greedy", "mates sampled", "preempted greedy", "preempted sampled", "prefixes",
        "siblings", "cancelled"]  # fmt: skip


def law(name: str, wanted: Callable[[str, str], bool] = lambda verb, name: True) -> Callable[[axes.Test], axes.Test]:
    return axes.over(partial(axes.singles, LAWS.index(name), len(LAWS), wanted=wanted), named)


def named(case: Single) -> str:
    verb, name, schedule = case
    return f"{verb}.{name}" + ("" if verb == "schedule" else f" {schedule.partition(':')[0]}")


def given(case: Single) -> dict[str, str]:
    verb, name, schedule = case
    return {"schedule": schedule} | options(verb, name)


ALONE: dict[str, list[int]] = {}


def alone(case: Single, prompts: Sequence[list[int]], params: Params) -> list[list[int]]:
    """Each prompt by itself, whole. (Kept: several laws ask for the same.)"""
    verbs = options(*case[:2])
    if case[0] != "schedule":
        verbs["schedule"] = "prefill_first"
    found = []
    for prompt in prompts:
        key = repr((verbs, prompt, params))
        if key not in ALONE:
            (ALONE[key],) = tiny.outs(tiny.run(tiny.engine(verbs), [prompt], params))
        found.append(ALONE[key])
    return found


@cache
def dense(n: int = N) -> Reference:
    return reference({}, tiny.prompts(*LENGTHS), tiny.greedy(n))


@cache
def recomputed() -> Reference:
    """Greedy tokens by full recomputation."""
    found = [oracle.greedy(tiny.model(), prompt, N) for prompt in tiny.prompts(*LENGTHS)]
    return Reference(tiny.prompts(*LENGTHS), [tokens for tokens, _ in found], [gaps for _, gaps in found])


def is_lossy(verb: str, name: str) -> bool:
    return guarantee(verb, name) == "lossy"


@pytest.mark.parametrize(("verb", "name"), EVERY, ids=IDS)
def test_declares_itself(verb: str, name: str) -> None:
    cls = catalog.method(verb, name)
    assert cls.__dataclass_params__.frozen
    assert cls.guarantee in ("exact", "distribution", "lossy")
    assert cls.needs in ("nothing", "calibration", "trained", "second model")
    assert isinstance(cls.paper, str)
    assert cls.__doc__ and not cls.__doc__.startswith(cls.__name__ + "("), "the docstring is the documentation"
    for settings in ("neutral", "tight", "reference"):
        known = set(catalog.knobs_of(cls))
        assert set(getattr(cls, settings, {})) <= known, f"{settings} names knobs that do not exist"
    if "shares_prefix" in dir(cls):
        assert isinstance(catalog.build(verb, name).shares_prefix, bool)
    assert verb != "verify" or matches(cls) in ("all", "point", "none")
    for field in dataclasses.fields(cls):
        if field.name not in catalog.slots_of(cls):
            default = (field.default, field.default_factory)
            assert default != (dataclasses.MISSING, dataclasses.MISSING), f"knob {field.name} has no default"


@pytest.mark.parametrize(("verb", "name"), EVERY, ids=IDS)
def test_neutral_equals_dense(verb: str, name: str) -> None:
    """Law 2."""
    neutral = catalog.method(verb, name).neutral
    requests = tiny.run(tiny.engine(options(verb, name, neutral)), dense().prompts, tiny.greedy(N))
    dense().check(tiny.outs(requests))


@law("exact or biting", lambda *method: not is_lossy(*method))
def test_exact_methods_give_greedys_tokens(case: Single) -> None:
    """Law 1, against full recomputation, or the method's own slow reference if it names one."""
    equals_its_reference(case)


def equals_its_reference(case: Single) -> None:
    twin = slow(*case[:2])
    want = reference(twin, tiny.prompts(*LENGTHS), tiny.greedy(N)) if twin else recomputed()
    want.check(tiny.outs(tiny.run(tiny.engine(given(case)), want.prompts, tiny.greedy(N))))


@law("exact or biting", is_lossy)
def test_lossy_methods_bite_where_they_are_tested(case: Single) -> None:
    """Otherwise the laws below would only test dense decoding. (Sixty tokens: quantisation alone changes few.)"""
    got = tiny.outs(tiny.run(tiny.engine(given(case)), dense(60).prompts, tiny.greedy(60)))
    assert got != dense(60).tokens


def independent_of_batch_mates(case: Single, how: str) -> None:
    """Law 4: alone or among others, in whole prompts or as a scheduler has it, a request's tokens are its own."""
    prompts, params = tiny.prompts(*LENGTHS), PARAMS[how]
    want = alone(case, prompts, params)
    assert tiny.outs(tiny.run(tiny.engine(given(case)), prompts, params)) == want
    if case[0] != "schedule":
        whole = given(case) | {"schedule": "prefill_first"}
        assert tiny.outs(tiny.run(tiny.engine(whole), prompts, params)) == want


@law("mates greedy")
def test_independent_of_batch_mates(case: Single) -> None:
    independent_of_batch_mates(case, "greedy")


@law("mates sampled")
def test_independent_of_batch_mates_when_sampled(case: Single) -> None:
    independent_of_batch_mates(case, "sampled")


def preemption_changes_nothing(case: Single, params: Params) -> None:
    """Laws 4 and 13: freed and recomputed at any moment, a request goes on with the same tokens."""
    prompts = tiny.prompts(41, 50, 60)
    want = alone(case, prompts, params)
    lost = 0
    for moment in (1, 3, 8):
        placed = tiny.engine(given(case))
        requests = [Request(p, params) for p in prompts]
        for request in requests:
            placed.add(request)
        for step in range(2 * moment):
            if max(request.n_out for request in requests) > 12:
                break  # guesses are good, and somebody must still be there to be preempted
            if step % moment == moment - 1:
                lost += preempt(placed, lambda i, request: i > 0)
            placed.step()
        while not any(request.n_out > moment for request in requests):
            placed.step()
        assert preempt(placed, lambda i, request: request.n_out > 0), "nobody decodes"
        tiny.finish(placed, requests)
        assert tiny.outs(requests) == want
    assert lost >= 3


@law("preempted greedy")
def test_preemption_changes_nothing(case: Single) -> None:
    preemption_changes_nothing(case, tiny.greedy(24))


@law("preempted sampled")
def test_preemption_changes_nothing_when_sampled(case: Single) -> None:
    preemption_changes_nothing(case, dataclasses.replace(PARAMS["sampled"], max_tokens=24))


def serve(placed: Placed, prompt: list[int], params: Params) -> list[int]:
    request = Request(prompt, params)
    placed.add(request)
    while request.left is None:
        placed.step()
    return request.out


@law("prefixes")
def test_prefix_reuse_changes_nothing(case: Single) -> None:
    """Law 10: a prompt met before gives the same tokens from the cache; none are met by methods that share nothing."""
    prefix_reuse_changes_nothing(given(case), catalog.method(*case[:2]))


def prefix_reuse_changes_nothing(verbs: dict[str, str], cls: type[Any]) -> None:
    prompts = tiny.prompts(100, 70)
    prompts.append(prompts[0][:80] + prompts[1][:30])
    cold = [serve(tiny.engine(verbs, prefix_cache=False), prompt, tiny.greedy(N)) for prompt in prompts]

    def hits(verbs: dict[str, str]) -> int:
        placed = tiny.engine(verbs)
        for _ in range(2):
            assert [serve(placed, prompt, tiny.greedy(N)) for prompt in prompts] == cold
        placed.forget_prefixes()
        assert placed.kv_bytes == 0
        return placed.counters.prefix_hits

    if getattr(cls, "shares_prefix", True):  # at least where prompts are computed whole, before anything is evicted
        assert hits(verbs) > 0 or ("schedule" in verbs and hits(verbs | {"schedule": "prefill_first"}) > 0)
    else:
        assert hits(verbs) == 0


@law("siblings")
def test_siblings_equal_requests_of_their_own(case: Single) -> None:
    """A forked sample (n > 1) draws what a separate request with its seed would draw."""
    (prompt,), params = tiny.prompts(LENGTHS[0]), PARAMS["sampled"]
    placed = tiny.engine(given(case))
    first = Request(prompt, params)
    family = [first, first.sibling(1), first.sibling(2)]
    for request in family:
        placed.add(request)
    tiny.finish(placed, family)
    for request in family:
        assert [request.out] == alone(case, [prompt], request.params)


@law("cancelled")
def test_cancelled_at_any_moment_leaves_nothing(case: Single) -> None:
    """Law 13: memory goes back whenever a request is dropped, and its mates do not notice."""
    *short, long = tiny.prompts(*LENGTHS[:3])
    placed = tiny.engine(given(case))
    stay = [Request(prompt, PARAMS["greedy"]) for prompt in short]
    dropped = [Request(long, PARAMS["greedy"]) for _ in range(0, 12, 2)]
    for request in (stay[0], *dropped, stay[1]):
        placed.add(request)
    for request in dropped:  # one every other step, from before the first on
        placed.cancel(request)
        assert request.left is not None
        placed.step()
        placed.step()
    tiny.finish(placed, stay)
    assert tiny.outs(stay) == alone(case, short, PARAMS["greedy"])


def test_every_method_and_every_law_meet_every_scheduler() -> None:
    schedulers = set(axes.schedulers())
    for laws in (len(LAWS), 2):  # were there fewer laws than schedulers, too
        cases = [(law, *case) for law in range(laws) for case in axes.singles(law, laws, False, lambda *_: True)]
        assert {(law, schedule) for law, _, _, schedule in cases} == {(i, s) for i in range(laws) for s in schedulers}
        others = {(verb, name, schedule) for _, verb, name, schedule in cases if verb != "schedule"}
        assert len(others) == len(schedulers) * sum(verb != "schedule" for verb, _ in EVERY)


@pytest.mark.parametrize("each", [1, 2, 3])
def test_in_turn_all_of_the_others_are_met(each: int) -> None:
    others = "abcde"
    some, every = axes.turns(range(7), others, False, each), axes.turns(range(7), others, True, each)
    assert {other for _, other in some} == set(others) and len(set(some)) == len(some) == 7 * each
    assert set(every) == {(one, other) for one in range(7) for other in others} and len(every) == 35
