"""Positions of rows that are left once others have gone are in the KV budget: room for them is booked with the rows of
those requests whose rows may go, and the ledger is the bytes of all tensors, whatever goes, forks or is preempted."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from phasewise.bench.held import lying
from phasewise.engine.engine import Engine
from phasewise.kv.buffer import PLACE
from phasewise.kv.cache import KV
from phasewise.kv.handoff import landing, layout, pack, unpack
from phasewise.request.request import Request
from tests import seeds, tiny
from tests.engine.engines import step_all
from tests.laws import settings as laws

EVICTS: list[tuple[str, dict[str, object]]] = [
    ("snapkv", {}),
    ("snapkv", {"heads": "ada", "window": 16, "keep": 20}),
    ("h2o", {}),
    ("h2o", {"heads": "ada", "layers": "pyramid"}),
    ("tova", {}),
    ("keyformer", {}),
    ("zipvl", {}),
    ("rlkv", {}),
    ("longgen", {}),
    ("streaming", {}),
]
TURNS = [(name, knobs, ("", "int8")[i % 2]) for i, (name, knobs) in enumerate(EVICTS)]  # both stores are met
SLICES = {"schedule": "sarathi:budget=7"}


def verbs(name: str, knobs: dict[str, object], store: str = "") -> dict[str, str]:
    given = laws.options("evict", name, {**laws.tight("evict", name), **knobs})
    return {**given, "store": store} if store else given


def engine(given: dict[str, str], kv_bytes: int | None = None) -> Engine:
    made = tiny.engine(given, prefix_cache=False, **({} if kv_bytes is None else {"kv_bytes": kv_bytes}))
    assert isinstance(made, Engine)
    return made


def tensors(kvs: Sequence[KV]) -> int:
    """Bytes of all of them, and of what is booked for methods."""
    buffers = {id(slab.buffer): slab.buffer for kv in kvs for layer in kv.layers for slab in layer.slabs}
    beside = {id(layer.beside): layer.beside.booked for kv in kvs for layer in kv.layers}
    for buffer in buffers.values():
        assert buffer.positions.nbytes == buffer.wide * buffer.cap * PLACE
    rows = sum(lying(buffer.planes, buffer.positions) for buffer in buffers.values())
    return rows + sum(beside.values()) + sum(kv.drawn for kv in kvs)


def exact(made: Engine, requests: Sequence[Request]) -> None:
    assert made.ledger.used == tensors([request.kv for request in requests if request.kv is not None])


def said(request: Request) -> bool:
    return request.kv is not None and any(slab.said for layer in request.kv.layers for slab in layer.slabs)


@pytest.mark.parametrize(("name", "knobs", "store"), seeds.params(TURNS, 2, "positions"), ids=str)
def test_the_ledger_is_the_bytes_of_all_tensors(name: str, knobs: dict[str, object], store: str) -> None:
    """Of slices of prompts, of forks, after preemptions, until all have left: and some rows have positions to say."""
    made, seen, turns = engine({**verbs(name, knobs, store), **SLICES}), [False], [0]
    first = Request(tiny.prompts(60)[0], tiny.greedy(40))
    requests = [first, *(first.sibling(i) for i in (1, 2)), Request(tiny.prompts(80, seed=2)[0], tiny.greedy(30))]
    for request in requests:
        made.add(request)

    def each() -> None:
        exact(made, requests)
        seen[0] |= any(said(request) for request in requests)
        turns[0] += 1
        if turns[0] in (14, 25, 35):
            made.room.preempt(made.running[-1])
            exact(made, requests)

    step_all(made, requests, each)
    assert made.counters.preemptions >= 3 and seen[0] and made.ledger.used == 0


@pytest.mark.parametrize(("name", "knobs"), seeds.params(EVICTS, 3, "budgets of rows given up"), ids=str)
def test_giving_rows_up_never_takes_more_than_was_booked(name: str, knobs: dict[str, object]) -> None:
    """A request alone in a budget of just what it may need comes to its end: nothing is booked when rows go."""
    loose, new = engine(verbs(name, knobs)), 50
    request = Request(tiny.prompts(60)[0], tiny.greedy(new))
    runtime = loose.recipes[""]
    made = engine(verbs(name, knobs), runtime.need(request.prompt_len + new + runtime.margin))
    made.add(request)
    step_all(made, [request], lambda: exact(made, [request]))
    assert request.left is not None and request.left.how == "finished" and request.n_out == new
    assert made.counters.preemptions == 0


def test_rows_that_come_late_have_their_positions_booked() -> None:
    made, seen = engine(laws.options("skip", "lazyllm")), [False]
    requests = [Request(p, tiny.greedy(n)) for p, n in zip(tiny.prompts(100, 37), (25, 40))]
    for request in requests:
        made.add(request)

    def each() -> None:
        exact(made, requests)
        seen[0] |= any(said(request) for request in requests)
        for request in requests:
            if request.kv is not None:
                assert all(slab.buffer.wide == layer.wide for layer in request.kv.layers for slab in layer.slabs)

    step_all(made, requests, each)
    assert seen[0]


def test_who_gives_no_rows_up_books_no_positions() -> None:
    for given in ({}, {"store": "int8"}, {"attend": "quest:page=4,budget=12"}, {"draft": "prompt_lookup:k=3"}):
        made = engine(given)
        assert made.store.row_room == made.store.row_bytes
        request = Request(tiny.prompts(40)[0], tiny.greedy(12))
        made.add(request)
        step_all(made, [request], lambda made=made, request=request: plain(made, request))


def plain(made: Engine, request: Request) -> None:
    exact(made, [request])
    buffers = [slab.buffer for layer in request.kv.layers for slab in layer.slabs] if request.kv else []
    assert not any(buffer.wide for buffer in buffers)


def test_only_what_may_differ_is_booked() -> None:
    """Where all heads keep the same rows, one stands for all; layers of which no row goes have none."""
    shape = engine({}).store.shapes[0]
    found = {name: engine(verbs(name, {})).store.wide for name in ("streaming", "tova", "h2o", "longgen", "zipvl")}
    layers = len(found["h2o"])
    assert found["streaming"] == found["tova"] == found["zipvl"] == [1] * layers
    assert found["h2o"] == [shape.heads] * layers
    assert set(found["longgen"]) == {0, 1}


@pytest.mark.parametrize(("name", "knobs", "store"), seeds.params(TURNS, 2, "positions handed on"), ids=str)
def test_what_is_handed_on_is_booked_where_it_lands(name: str, knobs: dict[str, object], store: str) -> None:
    here, there = engine(verbs(name, knobs, store)), engine(verbs(name, knobs, store))
    request = Request(tiny.prompts(70)[0], tiny.greedy(60))
    here.add(request)
    while request.n_out < 40:
        here.step()
    assert request.kv is not None
    means = layout(here.model.config, here.store)
    room, live = landing(request.kv), request.kv.live_bytes
    header, packed = pack(request, means, 1)
    twin = Request(request.prompt, request.params, id="twin")
    twin.tokens, twin.computed = list(request.tokens), request.computed
    twin.kv, twin.state = unpack(header, [each.clone() for each in packed], there.store, means)
    assert there.ledger.used == tensors([twin.kv]) <= room
    assert twin.kv.live_bytes == live
    for mine, theirs in zip(request.kv.layers, twin.kv.layers):
        for one, other in zip(mine.slabs, theirs.slabs):
            assert torch.equal(mine.positions(one), theirs.positions(other))
    there.resume(twin)
    step_all(there, [twin], lambda: exact(there, [twin]))
    here.cancel(request)
    assert here.kv_bytes == there.kv_bytes == 0
