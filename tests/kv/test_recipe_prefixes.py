"""Recipes that shape a prompt alike share its cached prefixes; others never meet, and all make way for anyone."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from phasewise import catalog
from phasewise.engine.engine import Engine
from phasewise.options import parse
from phasewise.request.request import Request
from phasewise.verbs.place import Placed
from tests import seeds, tiny
from tests.engine.engines import step_all
from tests.laws.mixed import MATES, REWRITES, SHAPES, N, alone, build
from tests.laws.settings import options


def hits(placed: Placed, prompt: Sequence[int], recipe: str) -> tuple[int, list[int]]:
    """Rows of a prompt that were not computed, and the tokens."""
    before = placed.counters.prefix_hits
    request = Request(prompt, tiny.greedy(N), recipe=recipe)
    placed.add(request)
    while request.left is None:
        placed.step()
    return placed.counters.prefix_hits - before, tiny.outs([request])[0]


EVERY = ["", *SHAPES, *REWRITES]


@pytest.mark.parametrize(
    ("first", "second"), seeds.params([(a, b) for a in EVERY for b in EVERY], 8, "recipes' prefixes")
)
def test_prefixes_are_shared_by_those_that_shape_a_prompt_alike(first: str, second: str) -> None:
    recipes = {**SHAPES, **REWRITES}
    placed, prompt = build(recipes), tiny.prompts(101)[0]
    same = first == second or not {first, second} & REWRITES.keys()
    assert hits(placed, prompt, first)[0] == 0
    found, tokens = hits(placed, prompt, second)
    assert (found > 0) == same
    assert [tokens] == alone([Request(prompt, tiny.greedy(N), recipe=second)], recipes, {})
    assert hits(placed, prompt, second)[0] > 0
    placed.forget_prefixes()
    assert placed.kv_bytes == 0


@pytest.mark.parametrize("name", catalog.names("decode"))
def test_plain_prompts_are_what_their_method_says(name: str) -> None:
    """The rows of a prompt that others may have, bit by bit, are autoregressive's exactly where a decode method says
    so."""
    mine, plain = remembered(options("decode", name)), remembered({})
    equal = len(mine) == len(plain) and all(torch.equal(a, b) for a, b in zip(mine, plain))
    assert plain and equal == parse(options("decode", name))["decode"].traits.plain_prompts


def remembered(verbs: dict[str, str]) -> list[Tensor]:
    """What an engine keeps of a prompt for others, all layers and planes; nothing if it shares none."""
    placed = build({"mine": verbs}, {"schedule": "sarathi:budget=32"})  # so many rows at once, whoever cuts a prompt
    assert isinstance(placed, Engine)
    request, store = Request(tiny.prompts(65)[0], tiny.greedy(8), recipe="mine"), placed.recipes["mine"].store
    placed.add(request)
    while request.prefilling:
        placed.step()
    placed.cancel(request)
    if store.tree is None:
        return []
    nodes, layers = store.tree.match(request.prompt[:64]), list(store.layers(64))
    assert sum(node.rows for node in nodes) == 64
    store.tree.copy_into([node.planes for node in nodes], layers)
    return [plane[:, :64] for layer in layers for plane in layer.slabs[0].buffer.planes]


def test_unused_prefixes_of_all_recipes_make_way_for_anyone() -> None:
    recipes = {"long": MATES["long"], "small": {"store": "int8"}}
    row = build(recipes).recipes["long"].store.row_room  # type: ignore[attr-defined]
    placed = build(recipes, kv_bytes=256 * row)
    assert isinstance(placed, Engine)
    for recipe in ("long", "small", ""):
        hits(placed, tiny.prompts(40, seed=len(recipe))[0], recipe)
    kept = {name: runtime.store.tree.bytes for name, runtime in placed.recipes.items() if runtime.store.tree}
    assert all(kept.values()) and sum(kept.values()) == placed.prefix_bytes == placed.kv_bytes
    request = Request(tiny.prompts(170, seed=9)[0], tiny.greedy(4), recipe="long")
    placed.add(request)
    step_all(placed, [request])
    assert tiny.outs([request]) and placed.counters.preemptions == 0
