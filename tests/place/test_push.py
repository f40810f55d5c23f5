"""KV pushed while its prompt is computed: colocated's tokens, less to wait for, and nothing lost with a piece."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import cycle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phasewise.cluster.router import Router
from phasewise.errors import UserError
from phasewise.methods.place.disaggregated import Disaggregated
from phasewise.request.params import Params
from phasewise.request.request import Request
from tests import tiny
from tests.cluster.faulty import HEARD, TOLD, Fate, unsteady
from tests.engine.engines import alone, sampled
from tests.engine.test_engine import Arrival, arrivals
from tests.laws import settings as laws
from tests.place.links import Clock, check_router, disaggregated, engines, finish, shelf, workers
from tests.place.loads import survive
from tests.place.together import methods_of, one_fails, siblings
from tests.seeds import draw

PROMPTS = tiny.prompts(40, 90, 5, 64, 33)
ROW = tiny.engine().store.row_bytes
SLAB = 64 * ROW
CHUNKS = {"schedule": "sarathi:budget=16"}
LAYERS = {"schedule": "layered:rows_per_group=16"}  # tiny's four layers one by one, for prompts of 33 to 64 rows
MESSAGES = ("expect", "piece", "keep", "landed", "full")  # of a push, besides those of every hand-off
MIXED = [
    Params(12, temperature=t, seed=i, ignore_eos=True, repetition_penalty=1.2, logit_bias={7: 1.5}, top_p=0.9)
    for i, t in enumerate((0.0, 1.0, 0.7, 0.0, 1.3))
]


def pushing(verbs: dict[str, str] | None = None, knobs: str = "", **options: object) -> Router:
    return disaggregated(verbs or CHUNKS, knobs=":transfer=push" + knobs, **{"clock": Clock(), **options})


def together(placed: Router, params: list[Params]) -> list[Request]:
    requests = [Request(p, q) for p, q in zip(PROMPTS, params)]
    for request in requests:
        placed.add(request)
    return requests


def listen(placed: Router, kind: str) -> list[dict]:
    """The commands of one kind that the decoding workers get from now on."""
    heard: list[dict] = []

    def through(worker: object) -> None:
        obey = worker.obey

        def note(command: dict) -> None:
            if command["do"] == kind:
                heard.append(json.loads(json.dumps(command)))
            obey(command)

        worker.obey = note

    for worker in workers(placed, "decode"):
        through(worker)
    return heard


# ---- colocated's tokens
def same_as_colocated(verbs: dict[str, str]) -> Router:
    expected = tiny.plain(PROMPTS, MIXED, verbs)
    placed = pushing(verbs, ",decode=2")
    requests = together(placed, MIXED)
    finish(placed, requests)
    assert tiny.outs(requests) == expected
    assert (placed.counters.handoffs, placed.counters.restarts) == (5, 0)
    assert placed.counters.recomputed == tiny.corrected(PROMPTS, MIXED, verbs)
    return placed


@pytest.mark.parametrize(("store", "schedule"), [("int8", CHUNKS), ("cachegen", LAYERS)], ids=str)
def test_stores_that_chunk_prompts_themselves_are_pulled(store: str, schedule: dict[str, str]) -> None:
    placed = same_as_colocated(schedule | laws.options("store", store))
    assert placed.counters.push_fallbacks == (5 if store == "cachegen" else 0)


@pytest.mark.parametrize(
    "options", [laws.options("evict", "snapkv"), laws.options("attend", "quest")], ids=lambda options: str([*options])
)
def test_nothing_goes_before_rows_are_chosen(options: dict[str, str]) -> None:
    """What evicts of a prompt does so at its end, and only then is it known what there is to send."""
    counters = same_as_colocated(options | LAYERS).counters
    assert (counters.kv_bytes_exposed == counters.kv_bytes_sent) == ("evict" in options)


@pytest.mark.parametrize("schedule", [CHUNKS, LAYERS], ids=str)
@pytest.mark.parametrize("options", methods_of(draw(__name__), 2), ids=str)
def test_methods_go_on_where_they_were(options: dict[str, str], schedule: dict[str, str]) -> None:
    """A few of all methods, others every day; a hand-off of each of them is among the laws (tests/laws)."""
    same_as_colocated(options | schedule)


def test_siblings_have_their_own_pieces() -> None:
    placed = pushing(prefix_cache=False)
    siblings(placed, PROMPTS[0], finish)
    assert sum(engine.counters.rows for engine in engines(placed, "prefill")) == 40  # one prefill for all
    sent, exposed = placed.counters.kv_bytes_sent, placed.counters.kv_bytes_exposed
    assert (sent, exposed) == (4 * 40 * ROW, (40 - 32 + 3 * 40) * ROW)  # those of siblings leave when they have forked


def test_a_request_that_ends_with_its_first_token_gives_the_room_back() -> None:
    first = alone(Request(PROMPTS[1], tiny.greedy(3)))[0]
    placed = pushing()
    requests = [Request(PROMPTS[0], tiny.greedy(1)), Request(PROMPTS[1], Params(9, stop_tokens=(first,)))]
    for request in requests:
        placed.add(request)
    finish(placed, requests)
    assert [r.left.reason for r in requests] == ["length", "stop"]
    assert placed.counters.handoffs == 0


# ---- what crosses, and when
def test_chunks_cross_as_they_are_computed() -> None:
    placed = pushing(prefix_cache=False)
    heard = listen(placed, "piece")
    request = Request(PROMPTS[0], tiny.greedy(4))
    placed.add(request)
    finish(placed, [request])
    assert [piece["blocks"] for piece in heard] == [[[[0, 4], [a, b]]] for a, b in ((0, 16), (16, 32), (32, 40))]
    assert [piece["piece"] for piece in heard] == [0, 1, 2]
    assert ["packed" in piece for piece in heard] == [False, False, True]
    assert placed.counters.kv_bytes_sent == 40 * ROW and placed.counters.kv_bytes_exposed == 8 * ROW


def test_layers_cross_as_they_are_computed() -> None:
    placed = pushing(LAYERS, prefix_cache=False)
    heard = listen(placed, "piece")
    request = Request(PROMPTS[0], tiny.greedy(4))
    placed.add(request)
    finish(placed, [request])
    assert [piece["blocks"] for piece in heard] == [[[[layer, layer + 1], [0, 40]]] for layer in range(4)]
    assert placed.counters.kv_bytes_sent == 40 * ROW and placed.counters.kv_bytes_exposed == 10 * ROW


def test_a_prompt_of_one_step_crosses_in_one_piece() -> None:
    placed = pushing({"schedule": "prefill_first"}, prefix_cache=False)
    heard = listen(placed, "piece")
    request = Request(PROMPTS[0], tiny.greedy(4))
    placed.add(request)
    finish(placed, [request])
    assert len(heard) == 1 and placed.counters.kv_bytes_exposed == 40 * ROW


def test_a_cached_prefix_leaves_with_the_first_piece() -> None:
    placed = pushing()
    first = Request(PROMPTS[1], tiny.greedy(3))
    placed.add(first)
    while first.left is None:
        placed.step()
    heard = listen(placed, "piece")
    again = Request(PROMPTS[1], tiny.greedy(3))
    placed.add(again)
    finish(placed, [again])
    assert again.out == first.out and placed.counters.prefix_hits == 64
    assert heard[0]["blocks"] == [[[0, 4], [0, 80]]]


@pytest.mark.parametrize("schedule", [CHUNKS, LAYERS], ids=str)
def test_the_second_token_waits_for_less_than_if_it_is_pulled(schedule: dict[str, str]) -> None:
    counters = {}
    for transfer in ("pull", "push"):
        placed = disaggregated(schedule, knobs=f":transfer={transfer}", prefix_cache=False)
        finish(placed, together(placed, MIXED))
        counters[transfer] = placed.counters
    pull, push = counters["pull"], counters["push"]
    assert pull.kv_bytes_sent == pull.kv_bytes_exposed == push.kv_bytes_sent == sum(map(len, PROMPTS)) * ROW
    assert 4 * push.kv_bytes_exposed < pull.kv_bytes_exposed


def crossing(ready: list[float], seconds: list[float]) -> float:
    """When the last of these pieces has crossed a link, each sent when it is ready and those before it are gone."""
    free = 0.0
    for at, long in zip(ready, seconds, strict=True):
        free = max(free, at) + long
    return free


@pytest.mark.parametrize("compute", [1.0, 3.0])
@pytest.mark.parametrize("send", [0.5, 1.0, 2.0, 4.0])
def test_real_pieces_take_the_time_of_the_closed_forms(compute: float, send: float) -> None:
    """L layers of `compute` seconds, each `send` seconds on the link: what is really sent, timed by numbers."""
    step, each = 0, 40 * ROW // 4

    def run(transfer: str) -> float:
        nonlocal step
        placed = disaggregated(LAYERS, knobs=f":transfer={transfer}", prefix_cache=False)
        (worker,) = workers(placed, "prefill")
        put, ready, sizes = worker.transfer_buffer.put, [], []

        def note(tensors: list) -> dict:
            ready.append(compute * worker.engine.counters.steps)  # a step is a layer
            sizes.append(sum(t.nbytes for t in tensors))
            return put(tensors)

        worker.transfer_buffer.put = note
        request = Request(PROMPTS[0], tiny.greedy(2))
        placed.add(request)
        finish(placed, [request])
        return crossing(ready, [send * n / each for n in sizes])

    layers = 4
    assert run("pull") == layers * (compute + send)
    assert run("push") == (layers * compute + send if send <= compute else compute + layers * send)


# ---- room
def test_the_room_of_a_whole_prompt_is_kept_from_the_start_and_no_longer_than_needed() -> None:
    placed = pushing(prefix_cache=False)
    (decode,) = engines(placed, "decode")
    request = Request(PROMPTS[1], tiny.greedy(4))
    placed.add(request)
    assert decode.kv_bytes == decode.room.promised == 2 * SLAB and not decode.running
    while request.n_out < 2:
        placed.step()
        check_router(placed)
    assert decode.kv_bytes == 2 * SLAB and decode.room.promised == 0
    finish(placed, [request])


def test_pieces_wait_for_no_one_and_hold_no_more_than_the_budget() -> None:
    """A receiver that is slow to copy costs the sender memory up to its budget; the rest leaves with the last piece."""
    placed = pushing(kv_bytes=10 * SLAB, fate=lambda i: 30, kinds=["piece"], prefix_cache=False)
    (prefill,) = engines(placed, "prefill")
    requests = [Request(p, tiny.greedy(3)) for p in tiny.prompts(100, 110)]
    for request in requests:
        placed.add(request)
    for _ in range(20):
        placed.step()
        check_router(placed)
    assert max(prefill.store.ledger.peak, prefill.kv_bytes) <= 5 * SLAB
    finish(placed, requests)
    assert [r.out for r in requests] == [alone(r) for r in requests]


def test_without_room_to_keep_a_request_is_pulled() -> None:
    placed = pushing(kv_bytes=16 * SLAB, max_running=3, prefix_cache=False)
    requests = [Request(tiny.prompts(100, seed=i)[0], tiny.greedy(6)) for i in range(9)]
    for request in requests:
        placed.add(request)
    moves = [flight.transfer for flight in placed.flights.values()]
    assert [move is not None and move.pushed for move in moves] == [True] * 3 + [False] * 6
    finish(placed, requests)
    assert [r.out for r in requests] == [alone(r) for r in requests]
    assert (placed.counters.push_fallbacks, placed.counters.handoffs, placed.counters.recomputed) == (6, 9, 0)


def test_nobody_overtakes_requests_that_wait_for_room() -> None:
    placed = pushing(max_running=2, prefix_cache=False)
    old = [Request(p, tiny.greedy(4)) for p in tiny.prompts(30, 31, 32)]
    for request in old:
        placed.add(request)
    (decode,) = engines(placed, "decode")
    while decode.running or not old[0].n_out:
        placed.step()
        if old[0].left is not None:
            break
    late = Request(PROMPTS[0], tiny.greedy(4))
    placed.add(late)
    assert placed.flights[late.id].transfer is None or not placed.flights[old[2].id].homeless
    finish(placed, [*old, late])
    assert placed.counters.recomputed == 0


def test_a_worker_that_is_full_after_all_says_so_and_is_spared() -> None:
    placed = pushing(prefix_cache=False)
    (worker,) = workers(placed, "decode")
    fits, worker._inbox.fits = worker._inbox.fits, lambda store, tokens: False
    requests = together(placed, MIXED)
    placed.step()
    assert all(flight.transfer is None for flight in placed.flights.values())
    worker._inbox.fits = fits
    finish(placed, requests)
    assert tiny.outs(requests) == tiny.plain(PROMPTS, MIXED)
    assert (placed.counters.push_fallbacks, placed.counters.handoffs, placed.counters.restarts) == (5, 5, 0)


def test_what_is_done_goes_before_what_has_not_begun() -> None:
    """Room kept for a prompt far back in a queue is given to one that waits for it."""
    placed = pushing(knobs=",prefill=2", max_running=1, prefix_cache=False)
    slow, _ = workers(placed, "prefill")
    turn, slow.turn = slow.turn, lambda: None  # its queue is long
    behind, ready = (Request(p, tiny.greedy(3)) for p in PROMPTS[:2])
    for request in (behind, ready):
        placed.add(request)
    assert placed.flights[behind.id].transfer.pushed and placed.flights[ready.id].homeless
    while ready.left is None:
        placed.step()
        check_router(placed)
    assert behind.n_out == 0 and placed.flights[behind.id].homeless
    slow.turn = turn
    finish(placed, [behind])
    assert (ready.out, behind.out) == (alone(ready), alone(behind))
    assert (placed.counters.push_fallbacks, placed.counters.handoffs, placed.counters.restarts) == (2, 2, 0)


@pytest.mark.parametrize("transfer", ["shove", ""])
def test_bad_knobs_are_named(transfer: str) -> None:
    with pytest.raises(UserError, match=f"disaggregated: transfer='{transfer}': choose pull or push"):
        Disaggregated(transfer=transfer)


# ---- failures
FATES: list[Fate] = ["lose", "twice", 0, 2, 40]


@pytest.mark.parametrize("kind", ["expect", "piece", "landed"])
@pytest.mark.parametrize(("fate", "schedule"), zip(FATES, cycle([CHUNKS, LAYERS])), ids=str)
def test_a_message_that_is_lost_late_or_doubled_costs_no_token(fate: Fate, kind: str, schedule: dict[str, str]) -> None:
    """Of every kind, each third one."""
    clock = Clock()
    placed = pushing(
        schedule, ",deadline=10", clock=clock, fate=lambda i: fate if i % 3 == 1 else 0, kinds=[kind], max_running=2,
        prefix_cache=False,
    )  # fmt: skip
    requests = together(placed, [sampled(8, seed=i) for i in range(5)])
    finish(placed, requests, clock.tick)
    assert tiny.outs(requests) == [alone(r) for r in requests]
    assert placed.counters.emitted == 5 * 8
    if fate in (0, "twice") or kind == "landed":
        assert placed.counters.restarts == 0
    elif fate in ("lose", 40):
        assert placed.counters.restarts > 0


@pytest.mark.parametrize("kind", ["full", "keep"])
@pytest.mark.parametrize(
    ("fate", "place"), zip(FATES, cycle(["disaggregated:transfer=push,deadline=10", "splitwise:deadline=10"]))
)
def test_a_word_about_missing_room_that_is_lost_late_or_doubled_costs_no_token(
    fate: Fate, kind: str, place: str
) -> None:
    clock = Clock()
    placed = disaggregated({**CHUNKS, "place": place}, clock=clock, fate=lambda i: fate, kinds=[kind])
    worker = workers(placed)[-1]
    fits, asked = worker._inbox.fits, []

    def full_at_first(store: object, tokens: int) -> bool:
        asked.append(tokens)
        return len(asked) > 3 and fits(store, tokens)

    worker._inbox.fits = full_at_first
    requests = together(placed, [sampled(8, seed=i) for i in range(5)])
    finish(placed, requests, clock.tick)
    assert tiny.outs(requests) == [alone(r) for r in requests]
    if fate in (0, "twice"):
        assert placed.counters.restarts == 0 and placed.counters.push_fallbacks > 0
    elif fate in ("lose", 40):
        assert placed.counters.restarts > 0


def test_pieces_in_the_wrong_order_are_put_in_place() -> None:
    """Each piece takes longer than the one after it; the last comes first."""
    placed = pushing(fate=lambda i: max(0, 8 - 2 * i), kinds=["piece"], prefix_cache=False)
    placed.launcher.kinds = ()
    heard = listen(placed, "piece")
    placed.launcher.kinds = ("piece",)
    request = Request(PROMPTS[0], tiny.greedy(5))
    placed.add(request)
    finish(placed, [request])
    assert request.out == alone(request)
    assert placed.counters.restarts == 0 and placed.counters.handoffs == 1
    numbers = [piece["piece"] for piece in heard]
    assert numbers != sorted(numbers)


@pytest.mark.parametrize("spoiled", ["layout", "rows", "tensors", "parcel"])
def test_a_piece_that_does_not_fit_is_recomputed(spoiled: str) -> None:
    placed = pushing()
    (worker,) = workers(placed, "decode")
    obey = worker.obey

    def spoil(command: dict) -> None:
        if command["do"] == "piece" and spoiled == "layout" and "packed" in command:
            command["packed"]["layout"] = "of another engine"
        elif command["do"] == "piece" and spoiled == "rows":
            command["blocks"][0][1] = [1000, 1016]
        elif command["do"] == "piece" and spoiled == "tensors":
            command["blocks"][0][1] = [0, 1]
        elif command["do"] == "piece" and spoiled == "parcel":
            shelf(placed).parcels.pop(command["parcel"]["name"], None)
        obey(command)

    worker.obey = spoil
    requests = together(placed, MIXED)
    for _ in range(60):
        placed.step()
    finish(placed, requests)
    assert tiny.outs(requests) == tiny.plain(PROMPTS, MIXED)
    assert placed.counters.restarts >= 5


def test_a_prompt_that_is_preempted_on_its_way_goes_whole() -> None:
    placed = pushing(prefix_cache=False)
    (engine,) = engines(placed, "prefill")
    request = Request(PROMPTS[1], tiny.greedy(6))
    placed.add(request)
    for _ in range(3):
        placed.step()
    assert placed.counters.kv_bytes_sent == 3 * 16 * ROW
    engine.room.preempt(engine.running[0])
    finish(placed, [request])
    assert request.out == alone(request)
    assert (placed.counters.push_fallbacks, placed.counters.handoffs) == (1, 1)
    assert placed.counters.kv_bytes_exposed == 90 * ROW


def test_pieces_that_cannot_be_put_down_leave_with_the_last() -> None:
    placed = pushing(prefix_cache=False)
    (worker,) = workers(placed, "prefill")
    put, calls = worker.transfer_buffer.put, []

    def full(tensors: list) -> dict:
        calls.append(len(tensors))
        if len(calls) < 5:
            raise OSError("no space left")
        return put(tensors)

    worker.transfer_buffer.put = full
    request = Request(PROMPTS[1], tiny.greedy(6))
    placed.add(request)
    finish(placed, [request])
    assert request.out == alone(request)
    assert (placed.counters.restarts, placed.counters.kv_bytes_sent, placed.counters.kv_bytes_exposed) == (
        0, 90 * ROW, 10 * ROW,
    )  # fmt: skip


@pytest.mark.parametrize("fate", [0, 3, "lose"])
@pytest.mark.parametrize(("after", "kind"), zip(range(9), cycle(["piece", "expect"])))
def test_cancelling_at_any_moment_frees_both_sides(after: int, fate: Fate, kind: str) -> None:
    clock = Clock()
    placed = pushing(fate=lambda i: fate, kinds=[kind], clock=clock, prefix_cache=False)
    doomed, other = (Request(p, sampled(6)) for p in tiny.prompts(60, 8))
    placed.add(doomed)
    placed.add(other)
    for _ in range(after):
        clock.now += 2.0
        placed.step()
    had_left = doomed.left is not None
    assert placed.cancel(doomed) != had_left
    assert not placed.cancel(doomed)
    check_router(placed)
    finish(placed, [other], clock.tick)
    assert other.out == alone(other)
    assert doomed.out == alone(doomed)[: doomed.n_out]


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize(("after", "schedule"), zip([1, 2, 4, 7], cycle([CHUNKS, LAYERS])), ids=str)
def test_a_worker_may_die_at_any_moment(role: str, after: int, schedule: dict[str, str]) -> None:
    placed = pushing(schedule, ",decode=2", prefix_cache=False)
    requests = together(placed, [sampled(8, seed=i) for i in range(5)])
    for _ in range(after):
        placed.step()
        check_router(placed)
    next(handle for handle in placed.handles if handle.role == role).connection.kill()
    placed.step()
    finish(placed, requests)
    assert tiny.outs(requests) == [alone(r) for r in requests]
    assert placed.counters.workers_lost == 1 and placed.counters.emitted == 5 * 8


def test_the_last_piece_outlives_its_sender() -> None:
    """What is needed lies in the transfer buffer: nothing is computed again."""
    placed = pushing(fate=lambda i: 4, kinds=["piece"], prefix_cache=False)
    placed.launcher.kinds = ()
    request = Request(PROMPTS[0], tiny.greedy(5))
    placed.add(request)
    while not request.n_out:
        placed.step()
    next(handle for handle in placed.handles if handle.role == "prefill").connection.kill()
    placed.step()
    finish(placed, [request])
    assert request.out == alone(request) and placed.counters.restarts == 0


def test_pieces_of_the_dead_are_freed_when_they_have_been_copied() -> None:
    late = {2: 5, 4: 9}  # messages, counted from 0: that the first piece has landed, and the last piece
    placed = pushing(fate=lambda i: late.get(i, 0), kinds=["piece", "landed"], prefix_cache=False)
    request = Request(PROMPTS[0], tiny.greedy(5))
    placed.add(request)
    while (move := placed.flights[request.id].transfer) is None or move.offer is None:
        placed.step()
    assert move.pieces, "some are not known to have been copied"
    next(handle for handle in placed.handles if handle.role == "prefill").connection.kill()
    while not request.left:
        placed.step()
        check_router(placed)
    assert request.out == alone(request) and placed.counters.restarts == 0
    finish(placed, [request])
    assert not shelf(placed).parcels


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_request_that_fails_on_either_side_fails_alone(side: str) -> None:
    placed = pushing()
    one_fails(placed, side, PROMPTS, finish)


def test_a_prompt_whose_finished_kv_nobody_has_heard_of_keeps_its_deadline() -> None:
    """Others need the room that is kept for it, but its worker has computed it: it would never say so again."""
    one, clock = Arrival(1, 1, 1, 0.0, 0, None, head=False, stop=None), Clock()
    placed = pushing(
        CHUNKS, ",deadline=10", fate=unsteady(["lose"]), kinds=TOLD + HEARD + MESSAGES, clock=clock,
        kv_bytes=12 * SLAB, max_running=1,
    )  # fmt: skip
    survive(placed, [one, one, replace(one, new=2, step=0, siblings=1)], {}, clock)
    finish(placed, [], clock.tick)


# ---- everything at once
@settings(max_examples=10, deadline=None)
@given(
    st.lists(arrivals, min_size=1, max_size=6),
    st.lists(st.sampled_from(FATES), min_size=1, max_size=8),
    st.sampled_from([CHUNKS, LAYERS, {"schedule": "sarathi:budget=20"}]),
    st.tuples(st.integers(1, 2), st.integers(1, 2)),
    st.integers(6, 14),
    st.integers(1, 4),
    st.dictionaries(st.integers(0, 40), st.integers(0, 3), max_size=4),
)
def test_random_load_over_a_bad_link_to_mortal_workers(
    load: list[Arrival], fates: list[Fate], schedule: dict[str, str], sizes: tuple[int, int], slabs: int,
    max_running: int, deaths: dict[int, int],
) -> None:  # fmt: skip
    clock = Clock()
    prefills, decodes = sizes
    placed = pushing(
        schedule, f",prefill={prefills},decode={decodes},share={prefills / (prefills + decodes)},deadline=10",
        fate=unsteady(fates),
        kinds=TOLD + HEARD + MESSAGES, clock=clock,
        kv_bytes=slabs * SLAB * (prefills + decodes), max_running=max_running,
    )  # fmt: skip
    survive(placed, load, deaths, clock)
    finish(placed, [], clock.tick)
