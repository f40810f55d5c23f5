"""store.zipvl: as many rows in more bits as a layer has important tokens, just these, and bytes by closed form."""

from __future__ import annotations

from math import ceil
from typing import Any

import pytest
import torch

from phasewise.errors import UserError
from phasewise.kv.format import Raw
from phasewise.methods.evict.zipvl import ZipVL
from phasewise.methods.store._classed import IMPORTANT, FittedClasses
from phasewise.methods.store.zipvl import MixedZipVL
from phasewise.model.model import Model
from phasewise.ops import native
from phasewise.verbs.host import Host
from tests import tiny
from tests.kv.harness import Walk
from tests.watched import passes

GAP, HIGH, LOW, PROMPT = 16, 8, 2, 83
KNOBS: dict[str, Any] = {"tau": 0.5, "window": 5, "probes": 6}
MIXED = KNOBS | {"gap": GAP, "high": HIGH, "low": LOW}


def host(model: Model) -> Host:
    return Host(model, None, None, None, None)  # type: ignore[arg-type]


def walk(model: Model, **knobs: Any) -> Walk:
    method = MixedZipVL(**(MIXED | knobs))
    runtime = method.bind(host(model))
    one = Walk(model, tiny.prompts(PROMPT)[0], evict=runtime, attend=runtime, format=method.format())
    one.plain = one.phase
    return one


def important(model: Model) -> list[list[int]]:
    """By layer, as `evict.zipvl` finds them: those whose rows it leaves."""
    runtime = ZipVL(**KNOBS).bind(host(model))
    one = Walk(model, tiny.prompts(PROMPT)[0], evict=runtime, attend=runtime)
    one.plain = one.phase
    one.feed(one.request.prompt)
    return [one.positions(layer) for layer in range(model.config.layers)]


def test_a_layer_has_as_many_rows_in_more_bits_as_its_prompt_has_important_ones() -> None:
    """And these are they. Bytes: levels, classes, ends, the values' scales; the others as the model made them."""
    model, sealed = tiny.model(), PROMPT // GAP * GAP
    one, raw = walk(model), walk(model, high=16, low=16)
    assert torch.equal(one.feed(one.request.prompt), raw.feed(raw.request.prompt)), (
        "prompts are computed from true rows"
    )
    uppers, named = list[int](), important(model)
    for layer, stay in enumerate(named):
        blocks, shape = one.kv.layers[layer].blocks, one.kv.layers[layer].shape
        assert blocks is not None and isinstance(blocks.format, FittedClasses)
        mine = [slot for slot in stay if slot < sealed]
        upper = ceil(len(mine) / sealed * GAP)
        upper = upper if 2 * (GAP - upper) * (HIGH - LOW) > 32 else GAP
        uppers.append(upper)
        assert blocks.format.upper == upper
        off = [
            (a - b).abs().amax((0, 2))[:sealed]
            for a, b in zip(one.kv.layers[layer].read()[0].planes, raw.kv.layers[layer].read()[0].planes)
        ]
        worst = torch.stack(off).amax(0)  # of a row's numbers
        far = worst.topk(sealed // GAP * (GAP - upper)).indices.tolist()
        assert not set(far) & set(mine), "the rows in few bits are none of the important ones"
        numbers = shape.heads * shape.dim
        classes = [(upper, HIGH), (GAP - upper, LOW)]
        levels = sum(count * ceil(numbers * bits / 8) for count, bits in classes) + GAP // 8
        ends = 4 * GAP + 4 * numbers * sum(count > 0 for count, _ in classes)
        packed = sealed // GAP * (2 * levels + ends) + 2 * numbers
        assert one.kv.layers[layer].live_bytes == packed + (PROMPT - sealed) * 2 * numbers * 4
    assert len(set(uppers)) > 1, "layers need unlike numbers"
    assert one.ledger.used == one.kv.bytes + one.kv.drawn


def test_room_that_is_booked_for_all_rows_in_more_bits_is_given_back() -> None:
    one, most = walk(tiny.model()), walk(tiny.model(), tau=1.0)
    for each in (one, most):
        each.feed(each.request.prompt)
    assert all(layer.blocks is not None and layer.blocks.fit == GAP for layer in most.kv.layers), "all are important"
    assert one.kv.bytes < most.kv.bytes and one.ledger.used == one.kv.bytes + one.kv.drawn


@pytest.mark.skipif(native.library() is None, reason="no native kernels here")
def test_whole_native_steps_read_layers_whose_blocks_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """The open path over opened blocks is the twin, and float32 says how far either may be."""
    made, more, found = passes(monkeypatch), tiny.prompts(PROMPT + 40)[0][PROMPT:], dict[str, torch.Tensor]()
    for name, dtype in (("native", torch.bfloat16), ("opened", torch.bfloat16), ("exact", torch.float32)):
        with monkeypatch.context() as here:
            if name == "opened":
                here.setattr("phasewise.kv.blocks.packings", lambda format, shape: None)
            one = walk(Model.load(tiny.checkpoint(hidden=128), dtype=dtype))  # heads of 32 numbers
            one.feed(one.request.prompt)
            made.clear()
            found[name] = torch.cat([one.feed([token]) for token in more]).float()
        if name == "native":
            assert len({layer.blocks.fit for layer in one.kv.layers if layer.blocks is not None}) > 1
            assert len(made) == len(more) and all(each.whole for each in made)
    off = {name: float((found[name] - found["exact"]).norm() / found["exact"].norm()) for name in found}
    assert off["native"] < 1.2 * off["opened"] + 1e-3


def test_dumps_and_forks_keep_what_was_fitted() -> None:
    model, more = tiny.model(), tiny.prompts(PROMPT + 30)[0][PROMPT:]
    first = walk(model)
    first.feed(first.request.prompt)
    twin, other = first.fork(), walk(model)
    other.kv.load(first.kv.dump())
    other.request.tokens, other.request.computed = list(first.request.tokens), first.request.computed
    for token in more:
        want = first.feed([token])
        assert torch.equal(twin.feed([token]), want) and torch.equal(other.feed([token]), want)
    assert [one.kv.live_bytes for one in (twin, other)] == [first.kv.live_bytes] * 2


def test_a_second_class_that_takes_more_than_it_saves_is_left_out() -> None:
    format = FittedClasses(4, 2, 100, 100, True)
    for count, upper in ((1, 1), (2, 1), (101, 51), (182, 91), (183, 100), (200, 100)):
        marks = torch.rand(200)
        marks[torch.randperm(200)[:count]] += IMPORTANT
        assert format.fit(marks) == upper
    assert format.fitted(51).classes == ((51, 4), (49, 2))


def test_sixteen_bits_are_rows_as_they_are_and_bad_knobs_are_named() -> None:
    assert isinstance(MixedZipVL(high=16, low=16).format(), Raw)
    with pytest.raises(UserError, match="zipvl: high=8 and low=16: choose high at least as large as low"):
        MixedZipVL(high=8, low=16)
    with pytest.raises(UserError, match="zipvl: gap=0 must be at least 1"):
        MixedZipVL(gap=0)
    with pytest.raises(UserError, match=r"zipvl: tau=0 must lie above 0"):
        MixedZipVL(tau=0)
    with pytest.raises(UserError, match="store zipvl also fills attend: leave out --attend quest"):
        tiny.engine({"store": "zipvl", "attend": "quest"})
