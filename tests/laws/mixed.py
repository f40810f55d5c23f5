"""Engines with several recipes over the tiny model, and what their requests get alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from phasewise.builder import Builder
from phasewise.engine.limits import Limits
from phasewise.model.model import Model
from phasewise.options import parse, parse_recipes
from phasewise.request.params import Params
from phasewise.request.request import Request
from phasewise.verbs.place import Placed
from tests import tiny
from tests.laws.settings import options

PROMPTS = tiny.prompts(41, 70, 9, 33, 64)
N = 12
MATES = {
    "fast": {"draft": "prompt_lookup:k=3", "verify": "match"},
    "long": {"evict": "streaming:sinks=2,window=30"},
    "plain": {"decode": "autoregressive"},
}  # what runs beside the recipe that is looked at
# recipes that shape nothing of a prompt, and such that do
SHAPES: dict[str, dict[str, str]] = {
    "fast": MATES["fast"], "quick": {"skip": "unified:speedup=2,weights=none"},
    "pages": {"attend": "quest:page=4,budget=8"},
}  # fmt: skip
REWRITES = {"long": MATES["long"], "small": {"store": "int8"}, "blocks": options("decode", "block_diffusion")}
PARAMS = {
    "greedy": tiny.greedy(N),
    "sampled": Params(max_tokens=N, ignore_eos=True, temperature=0.9, top_p=0.9, seed=5),
}
Recipes = Mapping[str, Mapping[str, str]]


def build(recipes: Recipes, verbs: Mapping[str, str] | None = None, of: Model | None = None, **limits: Any) -> Placed:
    limits = {"kv_bytes": 64 << 20, **limits}
    verbs = dict(verbs or {})
    named = parse_recipes(verbs, recipes)
    return Builder(of or tiny.model(), parse(verbs), Limits(**limits), load=tiny.load, recipes=named).build()


def requests_of(names: Sequence[str], params: Params, prompts: Sequence[Sequence[int]] = PROMPTS) -> list[Request]:
    return [Request(prompt, params, recipe=name) for prompt, name in zip(prompts, names)]


def serve(placed: Placed, requests: Sequence[Request]) -> list[list[int]]:
    for request in requests:
        placed.add(request)
    tiny.finish(placed, requests)
    return tiny.outs(requests)


def alone(
    requests: Sequence[Request], recipes: Recipes, verbs: Mapping[str, str], of: Model | None = None
) -> list[list[int]]:
    """What each gets in an engine of its own, which has the request's methods as its default and no recipes."""
    return [_alone(request, recipes.get(request.recipe, {}), verbs, of) for request in requests]


ALONE: dict[str, list[int]] = {}


def _alone(request: Request, recipe: Mapping[str, str], verbs: Mapping[str, str], of: Model | None) -> list[int]:
    """(Kept where the model is the tiny one: its mates are asked for again and again, beside each method.)"""
    key = repr((sorted(recipe.items()), sorted(verbs.items()), request.prompt, request.params))
    if of is not None or key not in ALONE:
        own = parse_recipes(verbs, {"own": recipe})["own"] if recipe else parse(verbs)
        placed = Builder(of or tiny.model(), own, Limits(kv_bytes=64 << 20), load=tiny.load).build()
        (found,) = serve(placed, [Request(request.prompt, request.params)])
        if of is not None:
            return found
        ALONE[key] = found
    return ALONE[key]
