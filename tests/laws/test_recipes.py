"""Recipes per request: requests of many recipes share the steps of one engine, and none of them notices."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from phasewise.engine.engine import Engine
from phasewise.engine.invariants import check
from phasewise.model.model import Model
from phasewise.recipes import ENGINE_WIDE
from phasewise.request.params import Params
from phasewise.request.request import Request
from phasewise.step.phase import Phase
from phasewise.step.plan import AttentionPlan
from phasewise.verbs.attend import Attend
from tests import tiny
from tests.engine.engines import Faulty, step_all
from tests.laws import axes
from tests.laws.mixed import MATES, PARAMS, PROMPTS, N, alone, build, requests_of, serve
from tests.laws.settings import discovered, options

EVERY = [(verb, name) for verb, name in discovered() if verb not in ENGINE_WIDE]
SCHEDULES = ("sarathi:budget=24", "prefill_first", "layered:rows_per_group=16")


Case = tuple[tuple[str, str], str]  # verb and name, scheduler


def named(case: Case) -> str:
    (verb, name), schedule = case
    return f"{verb}.{name} {schedule.partition(':')[0]}"


# ---- laws 4 and 13: mixed batches change no one's tokens (each method's own: tests/laws/scenario.py)
@axes.over(lambda full: axes.turns(EVERY, SCHEDULES[:2], full), named, most=16)
def test_tight_memory_changes_nothing(case: Case) -> None:
    """Law 13, across recipes: whoever must make way, and however often, goes on with the tokens it has alone."""
    (verb, name), schedule = case
    recipes = {"mine": options(verb, name), **MATES}
    verbs = {"schedule": schedule}
    requests = requests_of(["mine", "", "long", "fast", "mine"], PARAMS["greedy"])
    want = alone(requests, recipes, {})
    probe = build(recipes, verbs)
    assert isinstance(probe, Engine)
    most = max(runtime.need(70 + N + 64) for runtime in probe.recipes.values())
    placed = build(recipes, verbs, kv_bytes=most + most // 8)
    assert isinstance(placed, Engine)
    waited: list[int] = []
    for request in requests:
        placed.add(request)
    step_all(placed, requests, lambda: waited.append(len(placed.waiting)))
    assert tiny.outs(requests) == want
    assert placed.counters.preemptions or max(waited), "memory was not tight"


@pytest.mark.parametrize("name", PARAMS)
def test_siblings_in_mixed_steps_equal_requests_of_their_own(name: str) -> None:
    recipes = {"fast": MATES["fast"], "long": MATES["long"], "quick": {"skip": "unified:speedup=2,weights=none"}}
    placed = build(recipes, {"schedule": "layered:rows_per_group=16"})
    families = []
    for recipe, prompt in zip(["fast", "long", "", "quick"], PROMPTS):
        first = Request(prompt, PARAMS[name], recipe=recipe)
        families += [first, first.sibling(1), first.sibling(2)]
    assert [r.recipe for r in families[:3]] == ["fast"] * 3
    assert serve(placed, families) == alone(families, recipes, {})
    assert placed.counters.prefix_hits == 0 and placed.counters.rows < sum(3 * r.known for r in families[::3])


@pytest.mark.parametrize("base", [{}, {"draft": "prompt_lookup:k=3"}, {"store": "int8"}], ids=str)
def test_in_bfloat16_mates_of_another_recipe_change_nothing(base: dict[str, str]) -> None:
    """Alone a plain request takes native steps; beside a recipe that looks inside a layer, the open path."""
    model = Model.load(tiny.checkpoint(hidden=64), dtype=torch.bfloat16)
    recipes = {
        "plain": {"decode": "autoregressive", "store": "slab"},
        "long": MATES["long"],
        "small": {"store": "int8"},
        "snap": {"evict": "snapkv:keep=8,window=4"},
        "quick": {"skip": "unified:speedup=2,weights=none"},
    }
    names = ["plain", "", "long", "small", "plain", "snap", "quick", "quick"]
    for params in (tiny.greedy(32), Params(max_tokens=32, ignore_eos=True, temperature=0.9, top_p=0.9, seed=5)):
        requests = requests_of(names, params)
        assert serve(build(recipes, base, of=model), requests) == alone(requests, recipes, base, of=model)


# ---- one engine: weights are read once for all recipes
def test_one_step_holds_plain_speculative_and_diffusion_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    recipes = {"fast": MATES["fast"], "blocks": options("decode", "block_diffusion")}
    placed = build(recipes)
    assert isinstance(placed, Engine)
    requests = requests_of(["", "fast", "blocks"], tiny.greedy(N))
    for request in requests:
        placed.add(request)
    together = 0
    while any(request.left is None for request in requests):
        before, known = placed.counters.forwards, [request.computed for request in requests]
        placed.step()
        assert placed.counters.forwards == before + 1
        together += all(request.computed != was for request, was in zip(requests, known))
        check(placed)
    assert together >= 3, "they did not share steps"
    assert len({id(r.phases[-1].decode) for r in placed.recipes.values()}) == 3
    assert tiny.outs(requests) == alone(requests, recipes, {})


def test_mixed_recipes_take_the_forwards_of_one_engine() -> None:
    """As many as the longest of them alone, not as all of them."""
    recipes = {"long": MATES["long"], "small": {"store": "int8"}, "quick": {"skip": "unified:speedup=2,weights=none"}}
    placed, names = build(recipes), ["", "long", "small", "quick"]
    requests = requests_of(names, tiny.greedy(N))
    serve(placed, requests)
    single = []
    for request in requests:
        apart = build(recipes)
        serve(apart, [Request(request.prompt, request.params, recipe=request.recipe)])
        single.append(apart.counters.forwards)
    assert placed.counters.forwards == max(single) < sum(single)
    assert placed.counters.forwards == placed.counters.steps == N


def test_in_bfloat16_a_step_is_one_forward_whatever_its_recipes() -> None:
    """Who looks inside a layer halves it for all; layers and weights of ones own are shared with nobody, and tokens are
    a request's own."""
    model = Model.load(tiny.checkpoint(hidden=64), dtype=torch.bfloat16)
    assert model.stack is not None, "there are no native kernels"
    recipes = {"fast": MATES["fast"], "small": {"store": "int8"}, "long": MATES["long"], "quest": {"attend": "quest"}}
    recipes |= {"tuned": {"skip": "unified:weights=random:0"}, "deep": {"skip": "unified:weights=none"}}
    for names in ["", "fast", "small"], ["", "fast", "long", "quest"], ["", "long", "tuned"], ["", "long", "deep"]:
        placed, requests = build(recipes, of=model), requests_of(names, tiny.greedy(N))
        together = serve(placed, requests)
        assert placed.counters.forwards == placed.counters.steps
        assert together == [serve(build(recipes, of=model), [twin])[0] for twin in requests_of(names, tiny.greedy(N))]


def test_equal_methods_are_bound_once() -> None:
    recipes = {"one": {"draft": "draft_model:model=tiny-draft"}, "two": {"draft": "draft_model:model=tiny-draft"}}
    recipes |= {"long": {"evict": "streaming"}, "other": {"draft": "draft_model:model=tiny-draft,k=2"}}
    placed = build(recipes)
    assert isinstance(placed, Engine)
    of = placed.recipes
    assert [*map(id, of["one"].phases)] == [*map(id, of["two"].phases)]
    assert of["one"].companions == of["two"].companions and len(of["one"].companions) == 1
    assert of["long"].phases[0].decode is of[""].phases[0].decode and of["long"].phases[0].evict is not None
    assert of["long"].phases[0].attend is of["other"].phases[0].attend is of[""].phases[0].attend
    assert of["other"].phases[0].decode is not of["one"].phases[0].decode
    assert of["other"].companions != of["one"].companions


def test_a_recipe_without_a_drafter_pays_nothing_for_anothers() -> None:
    placed = build({"fast": {"draft": "draft_model:model=tiny-draft"}})
    assert isinstance(placed, Engine)
    plain, fast = placed.recipes[""], placed.recipes["fast"]
    assert plain.need(64) == plain.store.cost(64) < fast.need(64)
    request = Request(PROMPTS[0], tiny.greedy(4))
    placed.add(request)
    placed.step()
    assert placed.kv_bytes - placed.prefix_bytes == plain.need(len(PROMPTS[0]) + 1)
    tiny.finish(placed, [request])


# ---- failures
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("verb", ["rows", "propose", "accept"])
def test_a_recipe_whose_method_raises_fails_only_its_own(verb: str, schedule: str) -> None:
    recipes = {"bad": {"decode": "contrastive:amateur=tiny-draft"}, **MATES}
    verbs = {"schedule": schedule}
    placed = build(recipes, verbs)
    assert isinstance(placed, Engine)
    requests = requests_of(["", "bad", "fast", "long", "bad"], PARAMS["sampled"])
    want = alone(requests, recipes, verbs)
    decode = Faulty(placed.recipes["bad"].phases[0].decode, [verb], {requests[1].id, requests[4].id})
    for phase in placed.recipes["bad"].phases:
        object.__setattr__(phase, "decode", decode)
    for request in requests:
        placed.add(request)
    step_all(placed, requests)
    for request, tokens in zip(requests, want):
        if request.recipe == "bad":
            assert request.left is not None and (request.left.how, request.left.reason) == ("failed", f"Boom: {verb}")
        else:
            assert request.out == tokens


def test_a_phase_is_found_by_its_own_predicate() -> None:
    """Three phases: nothing counts them."""
    placed = build({"mine": {"evict": "streaming"}})
    assert isinstance(placed, Engine)
    runtime = placed.recipes["mine"]
    first, last = runtime.phases
    seen: dict[str, list[int]] = {}

    def watched(name: str, phase: Phase, holds: Any) -> Phase:
        class Watched(Attend):
            everything = True

            def plan(self, span: Any) -> AttentionPlan:
                seen.setdefault(name, []).append(span.request.n_out)
                return phase.attend.plan(span)

        return Phase(name, phase.decode, Watched(), phase.evict, phase.skip, holds)

    runtime.phases = [
        watched("prompt", first, first.holds),
        watched("early", last, lambda request: request.n_out < 4),
        watched("late", last, None),
    ]
    requests = requests_of(["mine", ""], tiny.greedy(8))
    want = alone(requests, {"mine": {"evict": "streaming"}}, {})
    assert serve(placed, requests) == want
    assert set(seen["prompt"]) == {0} and set(seen["early"]) == {1, 2, 3} and set(seen["late"]) == {4, 5, 6, 7}
