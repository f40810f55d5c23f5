"""Recipes in every placement: what crosses from worker to worker knows its recipe."""

from __future__ import annotations

import json

import pytest

from phasewise.builder import build as build_spec
from phasewise.cluster.engine_spec import EngineSpec
from phasewise.cluster.router import Router
from phasewise.engine.limits import Limits
from phasewise.errors import UserError
from phasewise.options import parse
from phasewise.request.request import Request
from tests import tiny
from tests.laws.mixed import MATES, PARAMS, PROMPTS, REWRITES, SHAPES, alone, build, requests_of, serve
from tests.laws.settings import options
from tests.seeds import draw

PLACES = (
    "colocated", "disaggregated", "disaggregated:transfer=push", "splitwise:prompt=1,token=2,threshold=60", "semi_pd",
)  # fmt: skip


@pytest.mark.parametrize("place", draw(__name__).sample(PLACES, 2))
def test_recipes_in_every_placement(place: str) -> None:
    recipes = {"small": {"store": "int8"}, "blocks": options("decode", "block_diffusion"), **MATES}
    recipes["drafts"] = {"draft": "draft_model:model=tiny-draft,k=3"}
    names = ["", "small", "fast", "long", "blocks"]
    for params in PARAMS.values():
        requests = requests_of(names, params) + requests_of(["drafts", "small", "long"], params)
        first = Request(PROMPTS[0], params, recipe="small")
        requests += [first, first.sibling(1)]
        placed = build(recipes, {"place": place})
        assert serve(placed, requests) == alone(requests, recipes, {})
        assert isinstance(placed, Router) == (place != "colocated")
        if isinstance(placed, Router):
            assert placed.counters.handoffs >= 4 and placed.counters.restarts == 0


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_worker_that_replaces_another_knows_recipes_that_came_later(role: str) -> None:
    placed = build({}, {"place": "disaggregated"})
    assert isinstance(placed, Router)
    placed.learn({"long": parse(MATES["long"])})
    next(handle for handle in placed.handles if handle.role == role).connection.kill()
    requests = requests_of(["long", ""], PARAMS["greedy"])
    assert serve(placed, requests) == alone(requests, {"long": MATES["long"]}, {})
    assert placed.counters.workers_lost == 1


@pytest.mark.thorough
def test_recipes_in_processes_of_their_own() -> None:
    """What crosses the line is text: it is the same after a journey as JSON."""
    draft = str(tiny.checkpoint(layers=2, seed=1))
    recipes = {"small": {"store": "int8"}, "drafts": {"draft": f"draft_model:model={draft},k=3"}, **MATES}
    limits = Limits(kv_bytes=64 << 20, cluster="processes")
    verbs = {"place": "disaggregated:transfer=push"}
    source = EngineSpec(str(tiny.checkpoint()), limits, verbs=verbs, recipes=recipes)
    assert EngineSpec.of(json.loads(json.dumps(source.plain()))) == source
    requests = requests_of(["small", "drafts", "long", "", "fast"], PARAMS["sampled"])
    want = alone(requests, recipes, {})
    placed = build_spec(source).build()
    try:
        for request in requests:
            placed.add(request)
        while any(request.left is None for request in requests):
            placed.step()
        assert tiny.outs(requests) == want
        assert isinstance(placed, Router) and placed.counters.handoffs == len(requests)
    finally:
        placed.close()


def test_unknown_recipes_are_refused_by_name() -> None:
    for place in PLACES:
        placed = build(MATES, {"place": place})
        with pytest.raises(UserError, match="unknown recipe 'fsat'. Did you mean fast"):
            placed.add(Request([5], recipe="fsat"))
    with pytest.raises(UserError, match="unknown recipe"):
        build({}).add(Request([5], recipe="fast"))


def test_a_router_does_not_take_one_shape_for_another() -> None:
    """A prompt that a worker has cached for one recipe draws those of the same shape there, and no others."""
    placed = build({**SHAPES, **REWRITES}, {"place": "disaggregated:prefill=2"})
    assert isinstance(placed, Router)
    prompt = tiny.prompts(130)[0]
    request = Request(prompt, tiny.greedy(2))
    placed.add(request)
    for name, rows in (("", 128), ("fast", 128), ("small", 0), ("long", 0), ("blocks", 0)):
        for handle in placed.handles:
            handle.shape = placed.shape(Request(prompt, recipe=name))
        assert [handle.cached(prompt) for handle in placed.handles if handle.role == "prefill"] == [rows, 0]
    tiny.finish(placed, [request])
