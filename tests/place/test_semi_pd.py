"""Both phases on one pool: colocated's tokens, no copy, a budget that is never exceeded, and always somebody who can
go on."""

from __future__ import annotations

from dataclasses import asdict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from phasewise import catalog
from phasewise.cluster.core_split import Split
from phasewise.cluster.in_flight import InFlight
from phasewise.cluster.router import Router
from phasewise.cluster.shared_pool import InlineMemory
from phasewise.errors import UserError
from phasewise.kv.handoff import State
from phasewise.methods.place.semi_pd import SemiPD
from phasewise.request.params import Params
from phasewise.request.request import Request
from tests import tiny
from tests.cluster.faulty import HEARD, TOLD, Fate, unsteady
from tests.engine.engines import alone, break_decode, sampled
from tests.engine.test_engine import Arrival, arrivals
from tests.place.links import Clock, engines, workers
from tests.place.loads import survive
from tests.place.pooled import account, check_pool, finish, pool, semi_pd
from tests.place.together import methods_of, siblings
from tests.seeds import draw

PROMPTS = tiny.prompts(40, 90, 5, 64, 33)
SLAB = 64 * tiny.engine().store.row_bytes
MIXED = [
    Params(12, temperature=t, seed=i, ignore_eos=True, repetition_penalty=1.2, logit_bias={7: 1.5}, top_p=0.9)
    for i, t in enumerate((0.0, 1.0, 0.7, 0.0, 1.3))
]


def together(placed: Router, params: list[Params]) -> list[Request]:
    requests = [Request(p, q) for p, q in zip(PROMPTS, params)]
    for request in requests:
        placed.add(request)
    return requests


def same_as_colocated(verbs: dict[str, str]) -> None:
    expected = tiny.plain(PROMPTS, MIXED, verbs)
    placed = semi_pd(verbs)
    requests = together(placed, MIXED)
    finish(placed, requests)
    assert tiny.outs(requests) == expected
    assert placed.counters.handoffs == len(PROMPTS)
    assert placed.counters.recomputed == tiny.corrected(PROMPTS, MIXED, verbs)


# ---- colocated's tokens
@pytest.mark.parametrize("schedule", draw(__name__).sample(sorted(catalog.names("schedule")), 2))
def test_schedules(schedule: str) -> None:
    same_as_colocated({"schedule": schedule})


@pytest.mark.parametrize("options", methods_of(draw(__name__), 3), ids=str)
def test_methods_go_on_where_they_were(options: dict[str, str]) -> None:
    """A few of all methods, others every day; a hand-off of each of them is among the laws (tests/laws)."""
    same_as_colocated(options)


# ---- nothing is copied
def test_no_byte_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    names: dict[str, int] = {}
    keep = InlineMemory._keep

    def noted(memory: InlineMemory, planes: list[torch.Tensor]) -> tuple[str, list[torch.Tensor]]:
        name, planes = keep(memory, planes)
        names[name] = id(planes[0])
        return name, planes

    monkeypatch.setattr(InlineMemory, "_keep", noted)
    placed = semi_pd(prefix_cache=False)
    requests = together(placed, [tiny.greedy(6)] * 5)
    finish(placed, requests)
    counters = placed.counters
    assert counters.handoffs == 5 and counters.kv_bytes_moved == counters.kv_bytes_sent == 0
    layers = 4
    took = [planes for name, planes in names.items() if name.startswith("decode")]
    gave = [planes for name, planes in names.items() if name.startswith("prefill")]
    empty = 5 * layers  # made for a KV before it takes over
    assert len(gave) == 5 * layers and len(took) == 5 * layers + empty
    assert sum(planes in gave for planes in took) == 5 * layers, "decode reads the memory that prefill wrote"
    (decode,) = engines(placed, "decode")
    assert decode.counters.rows == 5 * 5 and decode.counters.kv_bytes_moved == 0


def test_only_what_siblings_share_is_copied() -> None:
    placed = semi_pd(prefix_cache=False)
    siblings(placed, PROMPTS[0], finish)
    assert placed.counters.handoffs == 4
    assert placed.counters.kv_bytes_moved == 3 * 40 * placed.fronts[0].store.row_bytes  # the last one has it alone
    assert sum(engine.counters.rows for engine in engines(placed, "prefill")) == 40


def test_a_prompts_prefix_is_cached_where_prompts_run() -> None:
    placed = semi_pd()
    for _ in range(2):
        request = Request(PROMPTS[1], tiny.greedy(3))
        placed.add(request)
        while request.left is None:
            placed.step()
    assert placed.counters.prefix_hits == 64
    assert [engine.prefix_bytes > 0 for engine in engines(placed)] == [True, False]
    finish(placed, [])


# ---- one budget
def test_one_request_may_have_it_all() -> None:
    """A prompt of half the pool goes on to fill the other half: with a budget split in two, it could not."""
    placed = semi_pd(kv_bytes=6 * SLAB, prefix_cache=False)
    request = Request(tiny.prompts(190)[0], tiny.greedy(120))
    placed.add(request)
    finish(placed, [request])
    assert request.out == alone(request) and pool(placed).table.peak == 6 * SLAB


def test_what_prompts_do_not_use_tokens_may() -> None:
    placed = semi_pd(kv_bytes=12 * SLAB, prefix_cache=False)
    requests = [Request(p, tiny.greedy(60)) for p in tiny.prompts(60, 60, 60, 60)]
    for request in requests:
        placed.add(request)
    most = 0
    while not all(r.left for r in requests):
        placed.step()
        check_pool(placed)
        most = max(most, account(placed, "decode").used)
    finish(placed, requests)
    assert most == 8 * SLAB and placed.counters.preemptions == 0


def test_prompts_leave_room_to_grow_for_what_runs() -> None:
    placed = semi_pd(kv_bytes=8 * SLAB, prefix_cache=False)
    old = Request(tiny.prompts(60)[0], tiny.greedy(150))
    placed.add(old)
    while not engines(placed, "decode")[0].running:
        placed.step()
    young = [Request(p, tiny.greedy(4)) for p in tiny.prompts(100, 110, 120, 90, 80, 70)]
    for request in young:
        placed.add(request)
    finish(placed, [old, *young])
    assert [r.out for r in (old, *young)] == [alone(r) for r in (old, *young)]
    assert placed.counters.preemptions == 0, "it never had to give way, nor anybody to it"


@pytest.mark.parametrize(("slabs", "max_running"), [(5, 8), (6, 2), (9, 1)])
def test_a_full_pool_never_stands_still(slabs: int, max_running: int) -> None:
    placed = semi_pd(kv_bytes=slabs * SLAB, max_running=max_running)
    requests = [Request(tiny.prompts(50 + i, seed=i)[0], tiny.greedy(100)) for i in range(8)]
    for request in requests:
        placed.add(request)
    finish(placed, requests)
    assert [r.out for r in requests] == [alone(r) for r in requests]


@pytest.mark.parametrize("decode", ["contrastive:amateur=tiny-draft", "speculative"])
def test_a_full_pool_with_companions(decode: str) -> None:
    draft = {"draft": "draft_model:model=tiny-draft,k=3", "verify": "match"} if decode == "speculative" else {}
    verbs = {"decode": decode, **draft}
    placed = semi_pd(verbs, kv_bytes=12 * SLAB)
    requests = [Request(tiny.prompts(50 + i, seed=i)[0], tiny.greedy(40)) for i in range(4)]
    for request in requests:
        placed.add(request)
    finish(placed, requests)
    assert tiny.outs(requests) == [tiny.plain([r.prompt], r.params, verbs)[0] for r in requests]


def test_unused_prefixes_make_way_on_the_other_side() -> None:
    placed = semi_pd(kv_bytes=8 * SLAB)
    for seed in range(4):  # fills the pool with what nobody uses any more
        request = Request(tiny.prompts(97, seed=seed)[0], tiny.greedy(1))
        placed.add(request)
        while request.left is None:
            placed.step()
    full = account(placed, "prefill").used
    assert full >= 5 * SLAB
    request = Request(tiny.prompts(20, seed=9)[0], tiny.greedy(400))
    placed.add(request)
    while request.left is None:
        placed.step()
        check_pool(placed)
    assert request.out == alone(request) and placed.counters.preemptions == 0
    assert account(placed, "prefill").used < full
    finish(placed, [])


def test_what_can_never_run_is_refused() -> None:
    placed = semi_pd(kv_bytes=5 * SLAB)
    with pytest.raises(UserError, match="raise --kv-bytes or lower max_tokens"):
        placed.add(Request([5] * 200, Params(max_tokens=100)))


# ---- failures
FATES = ["lose", "twice", 2, 40]


@pytest.mark.parametrize("fate", FATES)
@pytest.mark.parametrize("kind", [*TOLD, *HEARD])
def test_a_message_that_is_lost_late_or_doubled_costs_no_token(fate: Fate, kind: str) -> None:
    clock = Clock()
    placed = semi_pd(fate=lambda i: fate if i % 2 == 0 else 0, kinds=[kind], clock=clock)
    requests = together(placed, [sampled(8, seed=i) for i in range(5)])
    finish(placed, requests, clock.tick)
    assert tiny.outs(requests) == [alone(r) for r in requests]


@pytest.mark.parametrize("after", range(8))
def test_cancelling_at_any_moment_frees_everything_at_once(after: int) -> None:
    placed = semi_pd({"schedule": "sarathi:budget=16"}, prefix_cache=False)
    doomed, other = (Request(p, sampled(6)) for p in tiny.prompts(40, 8))
    placed.add(doomed)
    placed.add(other)
    for _ in range(after):
        placed.step()
    assert placed.cancel(doomed) != (doomed.left is not None and doomed.left.how == "finished")
    check_pool(placed)
    assert not any(doomed.id in worker._jobs or doomed.id in worker._offers for worker in workers(placed))
    finish(placed, [other])
    assert other.out == alone(other) and doomed.out == alone(doomed)[: doomed.n_out]


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("after", [1, 2, 4, 7])
def test_a_worker_may_die_at_any_moment(role: str, after: int) -> None:
    placed = semi_pd({"schedule": "sarathi:budget=40"}, kv_bytes=16 * SLAB)
    requests = together(placed, [sampled(8, seed=i) for i in range(5)])
    for _ in range(after):
        placed.step()
    next(handle for handle in placed.handles if handle.role == role).connection.kill()
    placed.step()
    finish(placed, requests)
    assert tiny.outs(requests) == [alone(r) for r in requests]
    assert placed.counters.workers_lost == 1


def test_a_loan_outlives_its_lender() -> None:
    placed = semi_pd(max_running=1, prefix_cache=False)
    requests = together(placed, [tiny.greedy(30)] * 5)

    def offered() -> list[InFlight]:
        moves = [(flight, flight.transfer) for flight in placed.flights.values()]
        return [flight for flight, move in moves if move is not None and move.offer and move.state is State.RESERVED]

    while not offered():
        placed.step()
    waits = offered()
    placed.handles[0].connection.kill()
    placed.step()
    assert offered() == waits and pool(placed).table.used > 0
    finish(placed, requests)
    assert tiny.outs(requests) == [alone(r) for r in requests]
    assert all(flight.attempt < 5 for flight in waits), "what lay there was not computed again"


def test_a_loan_that_is_gone_is_computed_again() -> None:
    placed = semi_pd(prefix_cache=False)
    lender = workers(placed, "prefill")[0]._lender
    put = lender.put

    def lost(request: Request, attempt: int) -> tuple[dict, dict]:
        packed, parcel = put(request, attempt)
        pool(placed).drop(parcel["loan"])
        return packed, parcel

    lender.put = lost
    request = Request(PROMPTS[1], tiny.greedy(6))
    placed.add(request)
    finish(placed, [request])
    assert request.out == alone(request)
    assert placed.counters.handoffs == 0 and placed.counters.restarts == 1


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_request_that_fails_on_either_side_fails_alone(side: str) -> None:
    placed = semi_pd()
    break_decode(engines(placed, side)[0], ["accept"], {"bad"})
    requests = [Request(p, tiny.greedy(5), id="bad" if i == 1 else f"good-{i}") for i, p in enumerate(PROMPTS)]
    for request in requests:
        placed.add(request)
    finish(placed, requests)
    assert [r.id for r in requests if r.left.how == "failed"] == ["bad"]
    assert all(r.out == alone(r) for r in requests if r.id != "bad")


# ---- cores
def listen(placed: Router) -> list[tuple[str, list[int]]]:
    """Who is told to run on which cores."""
    told = []
    for worker in workers(placed):
        worker._settle = lambda cores, threads, name=worker.engine.parts.phases[-1].name: told.append((name, cores))
    return told


def test_cores_follow_the_target_that_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phasewise.builder.cores_here", lambda: [0, 1, 2, 3])
    clock = Clock()
    placed = semi_pd({"place": "semi_pd:slo_ttft=5,slo_tpot=0.5,window=4,dwell=4"}, clock=clock)
    shares = placed.policy.shares
    assert [spec.cores for spec in placed.policy.worker_specs()] == [(0, 1), (2, 3)]
    told = listen(placed)
    for i in range(20):  # two prompts a second, a second a step: prompts wait for nothing, tokens take a second each
        for j in range(2):
            placed.add(Request(tiny.prompts(9, seed=2 * i + j)[0], tiny.greedy(30)))
        clock.tick()
        placed.step()
    assert (shares.seen[-1].ttft, shares.seen[-1].tpot) == (1.0, 1.0)
    assert shares.split == Split((0,), (0, 1, 2, 3))
    assert told == [("prefill", [0]), ("decode", [1, 2, 3]), ("prefill", [0]), ("decode", [0, 1, 2, 3])]


def test_whoever_replaces_a_worker_gets_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phasewise.builder.cores_here", lambda: [0, 1, 2, 3])
    placed = semi_pd()
    placed.policy.shares.at = 3
    placed.step()
    placed.handles[1].connection.kill()
    placed.step()
    told = listen(placed)
    placed.step()
    assert told == [("decode", [3])]


def test_requests_that_left_are_forgotten() -> None:
    placed = semi_pd()
    requests = together(placed, [tiny.greedy(6)] * 5)
    placed.step()
    placed.cancel(requests[0])
    finish(placed, requests)
    assert not placed.policy._last


# ---- knobs
BAD = {"slo_ttft": 0.0, "slo_tpot": -1.0, "attain": 1.1, "window": 0.0, "dwell": -1.0, "deadline": 0.0, "cores": -1,
       "steps": 0, "least": 0, "memory": 0, "margin": 1.0}  # fmt: skip


@pytest.mark.parametrize(("name", "value"), BAD.items())
def test_bad_knobs_are_named(name: str, value: float) -> None:
    with pytest.raises(UserError, match=f"semi_pd: {name}={value}"):
        SemiPD(**{name: value})


def test_every_goal_of_the_controller_is_a_knob() -> None:
    given = {"attain": 0.75, "window": 1.5, "dwell": 2.5, "steps": 3, "least": 2, "margin": 0.25, "memory": 7}
    text = ",".join(f"{name}={value}" for name, value in given.items())
    placed = semi_pd({"place": f"semi_pd:slo_ttft=3,slo_tpot=0.5,{text}"})
    assert asdict(placed.policy.shares.goals) == given | {"ttft": 3.0, "tpot": 0.5}


def test_cores_that_there_are_not() -> None:
    with pytest.raises(UserError, match="cores=9999, but its workers may use"):
        semi_pd({"place": "semi_pd:cores=9999"})


# ---- everything at once
@settings(max_examples=12, deadline=None)
@given(
    st.lists(arrivals, min_size=1, max_size=6),
    st.lists(st.sampled_from([*FATES, 0, 0, 0]), min_size=1, max_size=8),
    st.integers(6, 16),
    st.integers(1, 4),
    st.booleans(),
    st.dictionaries(st.integers(0, 40), st.integers(0, 1), max_size=3),
)
def test_random_load_over_a_bad_link_to_mortal_workers(
    load: list[Arrival], fates: list[Fate], slabs: int, max_running: int, prefixes: bool, deaths: dict[int, int]
) -> None:
    clock = Clock()
    placed = semi_pd(
        {"schedule": "sarathi:budget=20"}, unsteady(fates), clock=clock,
        kv_bytes=slabs * SLAB, max_running=max_running, prefix_cache=prefixes,
    )  # fmt: skip
    survive(placed, load, deaths, clock, check_pool)
    assert placed.counters.workers_lost == len(deaths)
    finish(placed, [], clock.tick)
