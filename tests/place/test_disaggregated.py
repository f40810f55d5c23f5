"""Prefill and decode apart: colocated's tokens, no byte left behind, and nothing lost with a message."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phasewise import catalog
from phasewise.cluster.router import Router
from phasewise.errors import UserError
from phasewise.methods.place.disaggregated import Disaggregated
from phasewise.request.params import Params
from phasewise.request.request import Request
from tests import tiny
from tests.cluster.faulty import HEARD, TOLD, Fate, unsteady
from tests.engine.engines import Boom, alone, sampled
from tests.engine.test_engine import Arrival, arrivals
from tests.laws import settings as laws
from tests.place.links import Clock, check_router, disaggregated, engines, finish, shelf, workers
from tests.place.loads import survive
from tests.place.together import methods_of, one_fails
from tests.seeds import draw

PROMPTS = tiny.prompts(40, 90, 5, 64, 33)
SLAB = 64 * tiny.engine().store.row_bytes


def together(placed: Router, params: list[Params]) -> list[Request]:
    requests = [Request(p, q) for p, q in zip(PROMPTS, params)]
    for request in requests:
        placed.add(request)
    return requests


def same_as_colocated(verbs: dict[str, str], params: list[Params]) -> None:
    expected = tiny.plain(PROMPTS, params, verbs)
    placed = disaggregated(verbs)
    requests = together(placed, params)
    finish(placed, requests)
    assert tiny.outs(requests) == expected
    assert placed.counters.handoffs == len(PROMPTS)
    assert placed.counters.recomputed == tiny.corrected(PROMPTS, params, verbs)


MIXED = [
    Params(12, temperature=t, seed=i, ignore_eos=True, repetition_penalty=1.2, logit_bias={7: 1.5}, top_p=0.9)
    for i, t in enumerate((0.0, 1.0, 0.7, 0.0, 1.3))
]


# ---- colocated's tokens
@pytest.mark.parametrize("schedule", draw(__name__).sample(sorted(catalog.names("schedule")), 2))
def test_greedy_and_sampled_tokens(schedule: str) -> None:
    same_as_colocated({"schedule": schedule}, MIXED)


@pytest.mark.parametrize("options", methods_of(draw(__name__), 3), ids=str)
def test_methods_go_on_where_they_were(options: dict[str, str]) -> None:
    """A few of all methods, others every day; a hand-off of each of them is among the laws (tests/laws)."""
    same_as_colocated(options, MIXED)


def test_a_drafter_over_evicted_rows() -> None:
    evict = laws.options("evict", "snapkv")
    same_as_colocated({"draft": "prompt_lookup", "verify": "match"} | evict, MIXED)


def test_several_prefill_engines_share_the_prompts() -> None:
    placed = disaggregated(knobs=":prefill=3,share=0.6")
    requests = together(placed, [sampled(6, seed=i) for i in range(5)])
    assert sorted(len(engine.waiting) for engine in engines(placed, "prefill")) == [1, 2, 2]
    finish(placed, requests)
    assert tiny.outs(requests) == [alone(r) for r in requests]
    assert all(engine.counters.forwards for engine in engines(placed, "prefill"))


def test_siblings_fork_before_they_move() -> None:
    for knobs in ("", ":prefill=2"):
        placed = disaggregated(knobs=knobs, prefix_cache=False)
        parent = Request(PROMPTS[0], sampled(7))
        family = [parent, *(parent.sibling(i) for i in (1, 2, 3))]
        for request in family:
            placed.add(request)
        finish(placed, family)
        assert tiny.outs(family) == [alone(r) for r in family]
        assert placed.counters.handoffs == 4
        assert sum(engine.counters.rows for engine in engines(placed, "prefill")) == 40  # one prefill for all


def test_stop_strings_are_watched_on_the_callers_side() -> None:
    full = alone(Request(PROMPTS[0], sampled(12)))
    seen: list[int] = []

    def watch(token: int) -> bool:
        seen.append(token)
        return len(seen) == 5

    eager = {"draft": "draft_model:model=tiny,k=6", "verify": "match"}  # brings more tokens at once than are taken
    for verbs in ({}, eager):
        seen.clear()
        placed = disaggregated(verbs)
        request = Request(PROMPTS[0], sampled(12), watch=watch)
        placed.add(request)
        finish(placed, [request])
        assert request.out == seen == full[:5] and request.left.reason == "stop"
        assert placed.counters.emitted == 5


def test_a_request_that_ends_with_its_first_token_never_moves() -> None:
    placed = disaggregated()
    first = alone(Request(PROMPTS[1], tiny.greedy(3)))[0]
    requests = [
        Request(PROMPTS[0], tiny.greedy(1)),
        Request(PROMPTS[1], Params(9, stop_tokens=(first,))),
    ]
    for request in requests:
        placed.add(request)
    finish(placed, requests)
    assert [r.left.reason for r in requests] == ["length", "stop"]
    assert placed.counters.handoffs == 0 and not shelf(placed).parcels


# ---- what moves, and when
def test_exactly_the_rows_of_the_prompt_move() -> None:
    placed = disaggregated(prefix_cache=False)
    request = Request(PROMPTS[0], tiny.greedy(6))
    placed.add(request)
    finish(placed, [request])
    (decode,) = engines(placed, "decode")
    assert placed.counters.kv_bytes_moved == 40 * decode.store.row_bytes
    assert decode.counters.rows == 5  # the first token came from the other side


def test_a_prompts_prefix_is_cached_where_prompts_run() -> None:
    placed = disaggregated()
    first = Request(PROMPTS[1], tiny.greedy(3))
    placed.add(first)
    while first.left is None:
        placed.step()
    again = Request(PROMPTS[1], tiny.greedy(3))
    placed.add(again)
    finish(placed, [again])
    assert again.out == first.out and placed.counters.prefix_hits == 64
    assert (first.cached, again.cached) == (0, 64), "who asked is told"
    assert engines(placed, "decode")[0].prefix_bytes == 0


def test_a_full_decoding_engine_stops_new_prompts_and_loses_nothing() -> None:
    placed = disaggregated(kv_bytes=16 * SLAB, max_running=3, prefix_cache=False)
    requests = [Request(tiny.prompts(100, seed=i)[0], tiny.greedy(6)) for i in range(9)]
    for request in requests:
        placed.add(request)
    (prefill,), (decode,) = engines(placed, "prefill"), engines(placed, "decode")
    step = decode.step
    decode.step = list  # frozen
    for _ in range(30):
        placed.step()
        check_router(placed)
    offers = len(shelf(placed).parcels)
    assert len(decode.running) + offers + len(prefill.waiting) == 9
    assert len(decode.running) == 3  # no more may run at once
    assert offers == 4 and len(prefill.waiting) == 2  # of 8 slabs, 4 x 100 rows leave less than a prompt needs
    assert prefill.kv_bytes == 4 * 100 * prefill.store.row_bytes
    decode.step = step
    finish(placed, requests)
    assert [r.out for r in requests] == [alone(r) for r in requests]
    assert placed.counters.recomputed == 0


def test_requests_that_wait_for_memory_go_before_new_arrivals() -> None:
    placed = disaggregated(kv_bytes=12 * SLAB, prefix_cache=False)
    old, new = (Request(p, tiny.greedy(40)) for p in tiny.prompts(60, 61))
    placed.add(old)
    (decode,) = engines(placed, "decode")
    while not decode.running:
        placed.step()
    decode.room.preempt(decode.running[0])
    decode._admit = lambda: None  # it cannot come back for now
    placed.add(new)
    for _ in range(5):
        placed.step()
        check_router(placed)
    assert new.n_out == 1 and len(shelf(placed).parcels) == 1
    del decode._admit
    finish(placed, [old, new])
    assert [old.out, new.out] == [alone(old), alone(new)]


def test_latencies_of_a_move() -> None:
    clock = Clock()
    placed = disaggregated(clock=clock, fate=lambda i: 3, kinds=["take"])
    request = Request(PROMPTS[0], tiny.greedy(4))
    placed.add(request)
    while request.left is None:
        clock.now += 1.0
        placed.step()
    assert request.trace.ttft == 1.0 and request.trace.handoff == 3.0
    assert request.trace.tokens == [1.0, 4.0, 5.0, 6.0]


# ---- failures
FATES: list[Fate] = ["lose", "twice", 0, 2, 40]


@pytest.mark.parametrize("kind", TOLD + HEARD)
@pytest.mark.parametrize("fate", FATES)
def test_a_message_that_is_lost_late_or_doubled_costs_no_token(fate: Fate, kind: str) -> None:
    """Of every kind, each second one."""
    clock = Clock()
    placed = disaggregated(clock=clock, fate=lambda i: fate if i % 2 == 0 else 0, kinds=[kind], knobs=":deadline=10")
    requests = together(placed, [sampled(8, seed=i) for i in range(5)])
    finish(placed, requests, clock.tick)
    assert tiny.outs(requests) == [alone(r) for r in requests]
    assert placed.counters.emitted == 5 * 8
    if kind in ("take", "offer"):
        given_up = 3 if fate in ("lose", 40) else 0
        assert placed.counters.handoffs == 5 - given_up
        assert placed.counters.restarts == given_up
        rows = [r.prompt_len for r in requests]
        assert placed.counters.recomputed == (sum(rows[::2]) if given_up else 0)
    else:
        assert (placed.counters.handoffs, placed.counters.recomputed) == (5, 0)


def test_tokens_that_are_told_twice_count_once() -> None:
    placed = disaggregated(fate=lambda i: "twice", kinds=["progress"])
    requests = together(placed, [sampled(8, seed=i) for i in range(5)])
    finish(placed, requests)
    assert tiny.outs(requests) == [alone(r) for r in requests]


def test_a_request_that_starts_again_is_no_load_of_the_worker_that_it_had() -> None:
    """What tells its target of it is lost. Both decode workers are idle then, so the first one starts it again."""
    clock = Clock()
    lost_once = ["lose", *[0] * 9]
    placed = disaggregated(
        clock=clock, fate=lost_once.__getitem__, kinds=["take"], knobs=":decode=2,share=0.3,deadline=10",
        prefix_cache=False,
    )  # fmt: skip
    request = Request(PROMPTS[0], tiny.greedy(4))
    placed.add(request)
    finish(placed, [request], clock.tick)
    assert request.out == alone(request) and placed.counters.restarts == 1
    first, second = (engine.counters.rows for engine in engines(placed, "decode"))
    assert first > len(PROMPTS[0]) and second == 0


def test_kv_that_cannot_be_put_down_is_recomputed() -> None:
    placed = disaggregated()
    (worker,) = workers(placed, "prefill")

    def full(tensors: list) -> dict:
        raise OSError("no space left")

    worker.transfer_buffer.put = full
    requests = together(placed, MIXED)
    finish(placed, requests)
    assert tiny.outs(requests) == tiny.plain(PROMPTS, MIXED)
    assert placed.counters.handoffs == 0 and placed.counters.recomputed == sum(map(len, PROMPTS))


def test_a_message_that_does_not_fit_is_recomputed() -> None:
    placed = disaggregated()
    (worker,) = workers(placed, "decode")
    obey = worker.obey

    def spoil(command: dict) -> None:
        if command["do"] == "take":
            command["packed"]["layout"] = "of another engine"
        obey(command)

    worker.obey = spoil
    requests = together(placed, MIXED)
    finish(placed, requests)
    assert tiny.outs(requests) == tiny.plain(PROMPTS, MIXED)
    assert placed.counters.handoffs == 0 and placed.counters.recomputed == sum(map(len, PROMPTS))


def test_a_parcel_that_is_gone_is_recomputed() -> None:
    placed = disaggregated(fate=lambda i: 5, kinds=["take"])
    requests = together(placed, MIXED)
    while len(shelf(placed).parcels) < 5:
        placed.step()
    shelf(placed).parcels.clear()
    for _ in range(8):
        placed.step()  # what is offered is not there: nothing to check
    finish(placed, requests)
    assert tiny.outs(requests) == tiny.plain(PROMPTS, MIXED)
    assert placed.counters.handoffs == 0 and placed.counters.recomputed == sum(map(len, PROMPTS))


def test_siblings_that_do_not_fit_the_transfer_buffer_one_by_one_are_recomputed() -> None:
    """They share a prompt's KV until it is put down for each of them."""
    placed = disaggregated(kv_bytes=8 * SLAB, prefix_cache=False)
    parent = Request(tiny.prompts(150)[0], sampled(7))
    family = [parent, *(parent.sibling(i) for i in (1, 2, 3))]
    for request in family:
        placed.add(request)
    finish(placed, family)
    assert tiny.outs(family) == [alone(r) for r in family]
    assert (placed.counters.handoffs, placed.counters.restarts) == (1, 3)


def test_an_id_may_be_used_again_while_echoes_of_its_first_use_are_heard() -> None:
    placed = disaggregated(fate=lambda i: 4)
    first = Request(PROMPTS[0], tiny.greedy(9), id="me")
    placed.add(first)
    for _ in range(3):
        placed.step()
    assert placed.cancel(first)
    again = Request(PROMPTS[1], tiny.greedy(9), id="me")
    placed.add(again)
    finish(placed, [again])
    assert again.out == alone(again)


@pytest.mark.parametrize("fate", [0, 3, "lose"])
@pytest.mark.parametrize("after", range(9))
def test_cancelling_at_any_moment_frees_both_sides_at_once(after: int, fate: Fate) -> None:
    clock = Clock()
    placed = disaggregated(
        {"schedule": "sarathi:budget=16"}, fate=lambda i: fate, kinds=["take"], clock=clock, prefix_cache=False
    )
    doomed, other = (Request(p, sampled(6)) for p in tiny.prompts(40, 8))
    placed.add(doomed)
    placed.add(other)
    for _ in range(after):
        clock.now += 2.0
        placed.step()
    had_left = doomed.left is not None
    assert placed.cancel(doomed) != had_left
    assert not placed.cancel(doomed)
    check_router(placed)
    assert doomed not in [*placed.waiting, *placed.running] and doomed.kv is None
    finish(placed, [other], clock.tick)
    assert other.out == alone(other)
    assert doomed.out == alone(doomed)[: doomed.n_out]


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_request_that_fails_on_either_side_fails_alone(side: str) -> None:
    placed = disaggregated()
    bad = one_fails(placed, side, PROMPTS, finish)
    assert bad.n_out == (0 if side == "prefill" else 1)


def test_a_watch_that_raises_fails_its_request() -> None:
    def watch(token: int) -> bool:
        if request.n_out == 3:
            raise Boom("watching")
        return False

    placed = disaggregated()
    request = Request(PROMPTS[0], tiny.greedy(9), watch=watch)
    other = Request(PROMPTS[1], tiny.greedy(9))
    placed.add(request)
    placed.add(other)
    finish(placed, [request, other])
    assert (request.left.how, request.left.reason) == ("failed", "Boom: watching")
    assert other.out == alone(other)


def test_what_can_never_run_is_refused() -> None:
    placed = disaggregated(kv_bytes=10 * SLAB)
    with pytest.raises(UserError, match="raise --kv-bytes or lower max_tokens"):
        placed.add(Request([5] * 200, Params(max_tokens=100)))
    request = Request(PROMPTS[0], tiny.greedy(30), id="me")
    placed.add(request)
    for _ in range(4):
        with pytest.raises(UserError, match="'me' is already running"):
            placed.add(Request(PROMPTS[0], id="me"))
        placed.step()
    finish(placed, [request])


@pytest.mark.parametrize("knobs", [{"prefill": 0}, {"share": 0.0}, {"share": 1.0}, {"deadline": 0.0}])
def test_bad_knobs_are_named(knobs: dict[str, float]) -> None:
    ((name, value),) = knobs.items()
    with pytest.raises(UserError, match=f"disaggregated: {name}={value}"):
        Disaggregated(**knobs)


# ---- everything at once
@settings(max_examples=12, deadline=None)
@given(
    st.lists(arrivals, min_size=1, max_size=6),
    st.lists(st.sampled_from(FATES), min_size=1, max_size=8),
    st.integers(1, 2),
    st.integers(6, 14),
    st.integers(1, 4),
    st.dictionaries(st.integers(0, 40), st.integers(0, 3), max_size=4),
)
def test_random_load_over_a_bad_link_to_mortal_workers(
    load: list[Arrival], fates: list[Fate], prefills: int, slabs: int, max_running: int, deaths: dict[int, int]
) -> None:
    clock = Clock()
    placed = disaggregated(
        {"schedule": "sarathi:budget=20"}, fate=unsteady(fates), clock=clock,
        knobs=f":prefill={prefills},share={prefills / (prefills + 1)},deadline=10",
        kv_bytes=slabs * SLAB * (prefills + 1), max_running=max_running,
    )  # fmt: skip
    survive(placed, load, deaths, clock)
    assert placed.counters.workers_lost == len(deaths)
    finish(placed, [], clock.tick)


def test_a_block_that_the_prompt_leaves_incomplete_is_no_prompt_where_it_goes_on() -> None:
    """The first step there fills it; the load counts the request as one that generates."""
    same_as_colocated({"decode": "block_diffusion"}, MIXED)
