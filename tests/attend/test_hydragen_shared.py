"""attend.hydragen holds a shared prefix once: the ledger is at its closed form whoever comes, forks, waits or goes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from phasewise.engine.invariants import check
from phasewise.kv.buffer import rounded
from phasewise.load import load_model
from phasewise.model.model import Model
from phasewise.request.params import Params
from phasewise.request.request import Request
from tests import tiny

ON = {"attend": "hydragen"}
S = 320  # rows of the prefix, in whole blocks
SHARED = tiny.prompts(S + 1, seed=3)[0]  # its last row is computed anew
SPEC = {"decode": "speculative", "draft": "prompt_lookup:k=4"}


def half() -> Model:
    return Model.load(tiny.checkpoint(hidden=64), dtype=torch.bfloat16)


def run(engine: Any, request: Request) -> Request:
    engine.add(request)
    while request.left is None:
        step(engine)
    return request


def step(engine: Any) -> None:
    engine.step()
    check(engine)


def rows(engine: Any) -> int:
    """Rows that the ledger counts, in all layers."""
    assert engine.ledger.used % engine.store.row_bytes == 0
    return int(engine.ledger.used // engine.store.row_bytes)


@pytest.mark.parametrize("verbs", [ON, {}], ids=["hydragen", "dense"])
def test_sixteen_requests_take_the_prefix_once_and_what_is_their_own(verbs: dict[str, str]) -> None:
    """Under a budget in which four whole copies fit, all run at once, with dense attention's answers; dense attention
    does not get that far."""
    prefix, asked, own = 512, 16, 64
    prompts = tiny.prompts(prefix + 1, *[20] * asked, seed=1, vocab=1000)
    model = load_model("pocket", dtype=torch.bfloat16)
    whole = rounded(prefix + 20 + 9)
    assert whole == prefix + own
    engine: Any = tiny.engine(verbs, of=model)
    engine.ledger.limit = 4 * whole * engine.store.row_bytes
    run(engine, Request(prompts[0], tiny.greedy(1)))
    assert rows(engine) == prefix
    requests = [Request(prompts[0][:prefix] + tail, tiny.greedy(8)) for tail in prompts[1:]]
    for request in requests:
        engine.add(request)
    most = 0
    while not engine.idle:
        step(engine)
        most = max(most, len(engine.running))
        if most == asked and len(engine.running) == asked:
            assert rows(engine) == prefix + asked * own
    assert most == (asked if verbs else 3)  # dense: the cache and three copies
    assert rows(engine) == prefix and engine.counters.prefix_hits == asked * prefix
    dense: Any = tiny.engine(of=model, prefix_cache=False)
    for got in requests[::5]:
        assert got.out == run(dense, Request(got.prompt, tiny.greedy(8))).out


@pytest.mark.parametrize("verbs", [{}, {"store": "int8"}, SPEC], ids=["raw", "int8", "speculative"])
@pytest.mark.parametrize("model", [tiny.model, half], ids=["float32", "bfloat16"])
def test_who_comes_forks_waits_and_goes_leaves_the_ledger_at_its_closed_form(
    model: Callable[[], Model], verbs: dict[str, str]
) -> None:
    """And everybody's tokens are those of dense attention: of short prompts, long slices, trees and forks."""
    tails = tiny.prompts(9, 40, 3, 100, seed=5)
    params = Params(max_tokens=20, ignore_eos=True, temperature=0.8, seed=4)
    drawn = []
    for attend in (ON, {}):
        engine: Any = tiny.engine(attend | verbs, of=model())
        run(engine, Request(SHARED, tiny.greedy(1)))
        requests = [Request(SHARED[:S] + tail, params) for tail in tails]
        requests.append(requests[0].sibling(1))
        for request in requests:
            engine.add(request)
        for i in range(200):
            if i == 4 and attend:
                assert len(engine.running) == 5
                assert rows(engine) == S + 64 + _own(requests)  # the last prompt has one more whole block
            if i == 5:
                engine.room.preempt(requests[1])
                if attend:
                    assert rows(engine) == S + 64 + _own(each for each in requests if each is not requests[1])
            if i == 7:
                engine.cancel(requests[3])
            if engine.idle:
                break
            step(engine)
        assert engine.idle and engine.counters.preemptions == 1
        drawn.append([request.out for request in requests])
        engine.forget_prefixes()
        assert engine.kv_bytes == 0
    assert drawn[0] == drawn[1] and drawn[0][0] != drawn[0][4] and len(drawn[0][0]) == 20


def _own(requests: Any) -> int:
    """Rows that there is room for behind those held by reference; forks share theirs until one of them writes."""
    found = {id(slab.buffer): slab.buffer.cap for request in requests for slab in request.kv.layers[0].slabs}
    assert all(request.kv.refers and cap % 64 == 0 for request in requests for cap in found.values())
    for request in requests:
        layer = request.kv.layers[0]
        assert layer.shared.n == request.prompt_len // 64 * 64 and layer.n == request.computed
    return sum(found.values())


def test_who_computed_a_prefix_gives_its_copy_up() -> None:
    engine: Any = tiny.engine(ON)
    engine.add(first := Request(SHARED, tiny.greedy(40)))
    for _ in range(3):
        step(engine)
    assert first.kv is not None and first.kv.refers and rows(engine) == S + 64
    engine.add(second := Request(SHARED, tiny.greedy(40)))
    step(engine)
    assert second.cached == S and rows(engine) == S + 2 * 64
    engine.cancel(first)
    engine.prefixes.shrink(1 << 40)
    assert rows(engine) == S + 64, "what a request holds stays when who has computed it leaves"
    while second.left is None:
        step(engine)
    assert [second.out] == tiny.plain([SHARED], tiny.greedy(40))


def test_a_request_alone_fits_the_budget_that_it_is_accepted_for() -> None:
    """With its prefix in the cache too, up to its last token."""
    engine: Any = tiny.engine(ON)
    asked = Request(SHARED, tiny.greedy(40))
    want = run(engine, asked).out
    engine.add(again := Request(SHARED, tiny.greedy(40)))
    engine.ledger.limit = engine.runtime(asked).need(asked.limit)  # not even room for a draft
    while again.left is None:
        step(engine)
    assert again.out == want and again.cached == S


CONTIGUOUS = [
    {}, {"evict": "snapkv:keep=0.5"}, {"evict": "streaming:sinks=2,window=60"}, {"decode": "pie"},
    {"store": "cachegen"},
]  # fmt: skip


@pytest.mark.parametrize("verbs", CONTIGUOUS, ids=lambda verbs: "+".join(verbs.values()) or "dense")
def test_whose_rows_may_move_has_its_own_copy(verbs: dict[str, str]) -> None:
    engine: Any = tiny.engine(verbs if not verbs else ON | verbs)
    run(engine, Request(SHARED, tiny.greedy(1)))
    engine.add(request := Request(SHARED, tiny.greedy(40)))
    step(engine)
    assert (
        request.kv is not None and request.cached and not request.kv.refers and request.kv.layers[0].slabs[0].base == 0
    )


def test_prompts_that_leave_for_another_engine_are_their_own() -> None:
    placed: Any = tiny.engine({**ON, "place": "disaggregated"})
    assert [r.out for r in tiny.run(placed, [SHARED] * 3, tiny.greedy(12))] == tiny.plain([SHARED] * 3, tiny.greedy(12))
