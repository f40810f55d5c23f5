"""Derived data is in the KV budget: booked before it exists, counted once, given back, and never a reason to fail."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch

from phasewise import catalog
from phasewise.engine.engine import Engine
from phasewise.kv.beside import Beside
from phasewise.kv.buffer import Ledger
from phasewise.kv.cache import KV
from phasewise.kv.format import KVShape
from phasewise.methods.attend.quest import Quest
from phasewise.request.request import Request
from tests import seeds, tiny
from tests.engine.engines import sampled, step_all
from tests.kv.harness import Walk
from tests.laws import settings as laws

KEEPERS = [(verb, name) for verb, name, method in catalog.every() if getattr(method, "beside", None)]
PROMPTS = tiny.prompts(120, 124, 90, 132)


@dataclass
class Notes:
    bytes: int
    forked: int = 0

    def fork(self) -> Notes:
        return Notes(self.bytes, self.forked + 1)


# ---- the account itself
def test_what_was_announced_takes_nothing_and_more_is_booked_if_there_is_room() -> None:
    ledger = Ledger(100)
    beside = Beside(ledger, 40)
    beside.keep("a", Notes(30))
    beside.keep("b", Notes(10))
    assert (ledger.used, beside.bytes) == (40, 40)
    beside.keep("a", Notes(60))
    assert (ledger.used, beside.bytes) == (70, 70)
    beside.keep("b", Notes(41))  # 101 in all: everything stays as it was
    assert (ledger.used, beside.bytes, beside.get("b")) == (70, 70, Notes(10))
    beside.left()
    assert ledger.used == 0


def test_forks_count_once_until_one_of_them_writes() -> None:
    ledger = Ledger(1000)
    one = Beside(ledger, 40)
    one.keep("a", Notes(30))
    two = one.share()
    assert two is one and ledger.used == 40
    with pytest.raises(AssertionError, match="share"):
        two.keep("a", Notes(31))
    growth = two.growth(35)
    two = two.own(35)
    assert two is not one and ledger.used == 40 + growth == 75
    assert two.get("a") == Notes(30, forked=1) and one.get("a") == Notes(30)
    three = two.share()
    emptied = two.emptied()
    assert emptied.kept == {} and three.get("a") is not None and ledger.used == 75
    for each in (one, emptied, three):
        each.left()
    assert ledger.used == 0


# ---- methods that keep something
def kvs(engine: Engine) -> Iterator[KV]:
    yield from (request.kv for request in engine.running if request.kv is not None)


def storage(engine: Engine) -> int:
    """Bytes of all tensors that are really kept beside the rows, each once."""
    tensors = {
        value.data_ptr(): value.nbytes
        for kv in kvs(engine)
        for layer in kv.layers
        for derived in layer.derived.values()
        for value in vars(derived).values()
        if isinstance(value, torch.Tensor) and value.numel()
    }
    return sum(tensors.values())


def test_there_are_such_methods() -> None:
    assert ("attend", "quest") in KEEPERS


@pytest.mark.parametrize(
    ("verb", "name", "store"), [(*each, ("slab", "int8")[i % 2]) for i, each in enumerate(KEEPERS)], ids=str
)
def test_requests_that_crowd_each_other_stay_within_the_budget(verb: str, name: str, store: str) -> None:
    """Any of them may need all there is; nobody fails, and each gets the tokens that it gets alone."""
    verbs = {**laws.options(verb, name), "store": store}
    wide = tiny.engine(verbs, prefix_cache=False)
    need = max(wide.runtime(Request(p)).need(len(p) + 60 + 64) for p in PROMPTS)
    engine = tiny.engine(verbs, kv_bytes=need, prefix_cache=False)
    requests = [Request(p, sampled(60, seed=i)) for i, p in enumerate(PROMPTS)]
    for request in requests:
        engine.add(request)
    seen: list[int] = []

    def each() -> None:
        seen.append(storage(engine))
        booked = sum(kv.beside for kv in kvs(engine))
        assert seen[-1] <= booked and sum(kv.bytes for kv in kvs(engine)) + booked == engine.kv_bytes <= need

    step_all(engine, requests, each)
    assert engine.counters.preemptions > 0 and max(seen) > 0
    for request in requests:
        twin = Request(request.prompt, request.params)
        (out,) = tiny.outs(tiny.run(tiny.engine(verbs, prefix_cache=False), [twin.prompt], twin.params))
        assert request.left.reason == "length" and request.out == out


@pytest.mark.parametrize(("verb", "name"), KEEPERS)
def test_admission_counts_what_will_be_kept(verb: str, name: str) -> None:
    """A budget in which the rows of two requests fit, but not what is kept beside them, runs one after the other."""
    (prompt, other), dense = tiny.prompts(200, 200), tiny.engine(prefix_cache=False)
    budget = 2 * dense.store.cost(201)
    for verbs, together in ({}, 2), (laws.options(verb, name), 1):
        engine = tiny.engine(verbs, kv_bytes=budget, prefix_cache=False)
        requests = [Request(p, tiny.greedy(8)) for p in (prompt, other)]
        for request in requests:
            engine.add(request)
        most: list[int] = []
        step_all(engine, requests, lambda most=most, engine=engine: most.append(len(engine.running)))
        assert max(most) == together
        assert all(request.left.how == "finished" for request in requests)


@pytest.mark.parametrize(("verb", "name"), seeds.params(KEEPERS, 2, "siblings beside"))
def test_siblings_book_for_themselves_once_they_write(verb: str, name: str) -> None:
    engine = tiny.engine(laws.options(verb, name), prefix_cache=False)
    first = Request(PROMPTS[0], sampled(12))
    requests = [first, *(first.sibling(i) for i in (1, 2))]
    for request in requests:
        engine.add(request)
    step_all(engine, requests)
    for request in requests:
        assert (
            request.out
            == tiny.outs(
                tiny.run(tiny.engine(laws.options(verb, name), prefix_cache=False), [request.prompt], request.params)
            )[0]
        )


def test_a_limit_on_tokens_is_one_that_the_budget_holds() -> None:
    """`max_tokens` beyond the context is cut to what fits, what is kept beside the rows included."""
    verbs = {"attend": "quest:page=4,budget=12,dense_layers=0"}
    row = tiny.engine().store.row_bytes
    engine = tiny.engine(verbs, kv_bytes=500 * row, prefix_cache=False)
    request = Request(PROMPTS[0], tiny.greedy(1 << 20))
    engine.add(request)
    dense = tiny.engine(kv_bytes=500 * row, prefix_cache=False)
    alike = Request(PROMPTS[0], tiny.greedy(1 << 20))
    dense.add(alike)
    assert request.limit < alike.limit
    step_all(engine, [request])
    assert request.left.reason == "length" and request.computed == request.limit - 1


def test_without_room_bounds_are_worked_out_anew_each_time() -> None:
    """Nobody said what would be kept, and the budget is spent: slower, with the same numbers."""
    knobs = Quest(page=4, budget=12, dense_layers=0)
    tokens = tiny.prompts(100)[0]
    logits = []
    for spent in (False, True):
        walk = Walk(tiny.model(), tokens[:70], attend=knobs)
        walk.feed(tokens[:70])
        walk.kv.reserve(64)
        if spent:
            walk.ledger.limit = walk.ledger.used
        logits.append(torch.cat([walk.feed([token]) for token in tokens[70:100]]))
        assert spent is not any(layer.derived for layer in walk.kv.layers)
    torch.testing.assert_close(*logits, rtol=0, atol=0)


def test_quest_says_what_its_bounds_take() -> None:
    """Exactly: of a plain cache, with room for as many pages as its rows have room for; of one with gaps it also
    writes down which pages there are."""
    knobs = Quest(page=4, budget=12, dense_layers=1)
    walk = Walk(tiny.model(), tiny.prompts(72)[0][:71], attend=knobs)
    walk.feed(walk.request.tokens[:71])
    walk.feed([5])
    walk.feed([6])
    shape = KVShape(2, 12, torch.float32)
    kept = [sum(value.bytes for value in layer.derived.values()) for layer in walk.kv.layers]
    rows = walk.kv.layers[1].slabs[0].buffer.cap
    assert rows == 128 and kept == [0, *[rows // 4 * 2 * 12 * 4 * shape.heads] * 3]
    more = [0, *[rows // 4 * 16 * shape.heads] * 3]
    assert [knobs.beside(layer, shape, rows) - most for layer, most in enumerate(kept)] == more
    assert knobs.beside(1, shape, knobs.most) == 0
