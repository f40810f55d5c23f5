"""skip.skip_decode: how many layers a token runs follows from its place in the answer, in nested sets."""

from __future__ import annotations

import pytest
import torch

from phasewise.engine.engine import Engine
from phasewise.errors import UserError
from phasewise.methods.skip.skip_decode import SkipDecode
from phasewise.model.model import Model
from phasewise.ops import native
from phasewise.request.request import Request
from tests import tiny
from tests.watched import passes

LAYERS, PROMPT, NEW = 8, 11, 10
KNOBS = SkipDecode(first=0.9, last=0.4, tokens=6)
SPELLED = "skip_decode:first=0.9,last=0.4,tokens=6"


def model() -> Model:
    return tiny.model(layers=LAYERS)


def engine(skip: str = SPELLED, **verbs: str) -> Engine:
    placed = tiny.engine({"skip": skip, **verbs}, of=model())
    assert isinstance(placed, Engine)
    return placed


def test_depth_falls_linearly_and_never_below_its_share() -> None:
    depths = [KNOBS.depth(10, token) for token in range(12)]
    assert depths == [9, 8, 7, 6, 5, 4, 4, 4, 4, 4, 4, 4]
    assert SkipDecode(first=0.5, last=0.01, warm=3).depth(8, 999) == 4  # the warm layers and the last one
    assert SkipDecode(last=1.0).depth(8, 0) == SkipDecode(last=1.0).depth(8, 999) == 8


def test_layers_that_run_are_counted_to_the_row_and_hold_the_kv_of_all_tokens_before() -> None:
    placed = engine()
    request = Request(tiny.prompts(PROMPT)[0], tiny.greedy(NEW))
    placed.add(request)
    while request.left is None:
        placed.step()
        if request.kv is None or request.computed <= PROMPT:
            continue
        depth = KNOBS.depth(LAYERS, request.computed - PROMPT - 1)  # of the newest row
        running = [layer < KNOBS.warm or layer >= LAYERS - depth + KNOBS.warm for layer in range(LAYERS)]
        for layer, runs in zip(request.kv.layers, running):
            assert (layer.n == request.computed) is runs  # it has every token before, so its mask has no hole
    decoded = sum(KNOBS.depth(LAYERS, token) for token in range(NEW - 1))
    assert placed.counters.row_layers == PROMPT * LAYERS + decoded
    assert placed.counters.recomputed == 0


def test_a_token_is_what_the_layers_left_give_by_hand() -> None:
    """The second token of an answer, computed by a model whose lower middle layers are taken out for that row alone."""
    (prompt,) = tiny.prompts(PROMPT)
    first, second = tiny.outs(tiny.run(engine(), [prompt], tiny.greedy(2)))[0]
    plain = tiny.outs(tiny.run(engine("all"), [prompt], tiny.greedy(2)))[0]
    assert first == plain[0]  # prompts run all layers
    deep = engine(f"unified:speedup={LAYERS / KNOBS.depth(LAYERS, 0)},weights=none")
    kept = [layer for layer in range(LAYERS) if layer < 1 or layer >= LAYERS - KNOBS.depth(LAYERS, 0) + 1]
    skip = deep.parts.phases[-1].skip
    assert skip is not None and len(skip.walk) == len(kept)
    skip.walk, skip.skipped = tuple(kept), frozenset(range(LAYERS)) - frozenset(kept)
    assert tiny.outs(tiny.run(deep, [prompt], tiny.greedy(2)))[0][1] == second


@pytest.mark.skipif(native.library() is None, reason="no native kernels here")
def test_answers_take_native_steps_that_run_each_layer_over_the_tokens_that_take_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In bfloat16, with tokens at three places of their answers; and mates change nothing."""
    of = Model.load(tiny.checkpoint(hidden=64, layers=LAYERS), dtype=torch.bfloat16)
    placed = tiny.engine({"skip": SPELLED}, of=of)
    together = [Request(prompt, tiny.greedy(NEW)) for prompt in tiny.prompts(5, 17, 30)]
    made = passes(monkeypatch)
    for request in together:
        placed.add(request)
        placed.step()
    tiny.finish(placed, together)
    assert sum(each.rows * each.layers for each in made) == placed.counters.row_layers, "a step took the open path"
    assert placed.counters.forwards == placed.counters.steps
    alone = [tiny.run(tiny.engine({"skip": SPELLED}, of=of), [each.prompt], tiny.greedy(NEW)) for each in together]
    assert [tiny.outs(each)[0] for each in alone] == tiny.outs(together)


@pytest.mark.parametrize("knobs", ["last=0", "last=0.8,first=0.5", "first=1.5", "tokens=0", "warm=-1"])
def test_wrong_knobs_are_refused_by_name(knobs: str) -> None:
    with pytest.raises(UserError, match=knobs.partition("=")[0]):
        engine(f"skip_decode:{knobs}")


def test_mates_at_other_places_of_their_answers_change_nothing() -> None:
    prompts = tiny.prompts(5, 17, 30)
    alone = [tiny.outs(tiny.run(engine(), [prompt], tiny.greedy(NEW)))[0] for prompt in prompts]
    placed = engine(schedule="sarathi:budget=16")
    together = [Request(prompt, tiny.greedy(NEW)) for prompt in prompts]
    for request in together:
        placed.add(request)
        placed.step()
    tiny.finish(placed, together)
    assert tiny.outs(together) == alone
