"""Prefill and decode in real processes that are killed, stopped and starved at chosen moments: colocated's tokens, each
given out once, and nothing left behind."""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import pytest

from phasewise.cluster.router import Router
from phasewise.cluster.supervisor import Timeouts
from phasewise.request.params import Params
from tests import tiny
from tests.cluster.processes import (
    CALM,
    Order,
    finish,
    fork_server,
    frozen,
    go_on,
    gone,
    handle,
    kill,
    lost_with,
    outs,
    pid,
    segments,
    start,
    started,
    stop,
    until,
)
from tests.seeds import draw

PROMPTS = tiny.prompts(400, 40, 250, 5, 350, 120)
MIXED = [Params(50, temperature=t, seed=i, ignore_eos=True) for i, t in enumerate((0.0, 1.0, 0.7, 0.0, 1.3, 0.0))]
CHUNKS, LAYERS = "sarathi:budget=16", "layered"
QUICK = CHUNKS, "push"
DRAWN = draw(__name__).choice([(CHUNKS, "pull"), (LAYERS, "pull"), (LAYERS, "push")])  # another one every day
A_WHILE = 400  # steps of the router, 5 ms each if nothing happens
LATE = 20  # in which what was said before the moment is heard

each_kind = pytest.mark.parametrize(
    "placed", [QUICK, pytest.param(DRAWN, marks=pytest.mark.thorough)], indirect=True, ids="-".join
)


@pytest.fixture(scope="module", params=[QUICK], ids="-".join)
def placed(request: pytest.FixtureRequest) -> Iterator[Router]:
    """One worker for each side; no test may leave anything behind."""
    schedule, transfer = request.param
    verbs = {"schedule": schedule}
    router = started(f"disaggregated:prefill=1,decode=1,deadline=120,transfer={transfer}", verbs, prefix_cache=False)
    yield router
    router.close()
    assert segments(router) == []


@cache
def wanted() -> list[list[int]]:
    return tiny.plain(PROMPTS, MIXED)


def processes(placed: Router) -> list[int]:
    return [pid(handle) for handle in placed.handles]


def steps(placed: Router, n: int) -> None:
    for _ in range(n):
        placed.step()


def spoken(orders: list[Order]) -> int:
    return sum(order.request.n_out for order in orders)


# ---- moments
def rows(placed: Router) -> int:
    """Prompt rows computed by who is the prefill worker now."""
    return int(handle(placed, "prefill").state["counters"]["rows"])


def computing(placed: Router) -> bool:
    return any(flight.computing for flight in placed.flights.values())


def moving(placed: Router) -> bool:
    """A prompt's KV is on its way to somebody who does not have it yet."""
    moves = [flight.transfer for flight in placed.flights.values() if flight.transfer is not None]
    return any(move.offer is not None and move.target is not None for move in moves)


def decoding(placed: Router) -> bool:
    here = handle(placed, "decode")
    return any(flight.handle is here and flight.caller.n_out > 2 for flight in placed.flights.values())


def catch_decoding(placed: Router, process: int) -> None:
    """Stop the decode worker at a moment when it decodes, and all that it has said is heard."""
    assert process == pid(handle(placed, "decode"))
    while True:
        until(placed, lambda: decoding(placed))
        stop(process)
        steps(placed, LATE)
        if decoding(placed):
            return
        go_on(process)


@dataclass(frozen=True)
class Moment:
    """Once it is `near`, the worker that could end it is `held`, until it is `now`."""

    held: str
    near: Callable[[Router, int], bool]
    now: Callable[[Router], bool]


MOMENTS = {
    "prefill": Moment("prefill", lambda placed, before: rows(placed) > before, computing),
    "hand-off": Moment("decode", lambda placed, before: True, moving),
    "decode": Moment("decode", lambda placed, before: decoding(placed), decoding),
}


@contextmanager
def caught(placed: Router, moment: Moment, rows_before: int) -> Iterator[bool]:
    """Nobody moves, all that was said has been heard, and the moment is now; False: it went by while this process had
    no turn, and nothing is left to do."""
    while True:
        until(placed, lambda: placed.idle or moment.near(placed, rows_before))
        if placed.idle:
            yield False
            return
        with frozen([pid(handle(placed, moment.held))]):
            for _ in range(A_WHILE):
                placed.step()
                if moment.now(placed):
                    break
            with frozen(processes(placed)):
                for _ in range(LATE):
                    placed.step()
                if moment.now(placed):
                    yield True
                    return


# ---- killed
@each_kind
@pytest.mark.parametrize(
    ("moment", "role"), [("prefill", "prefill"), ("hand-off", "prefill"), ("hand-off", "decode"), ("decode", "decode")]
)
def test_killed_at_work(placed: Router, moment: str, role: str) -> None:
    now = False
    while not now:
        before, rows_before = placed.counters, rows(placed)
        orders = start(placed, PROMPTS, MIXED)
        with caught(placed, MOMENTS[moment], rows_before) as now:
            if now:
                again = lost_with(placed, handle(placed, role))
                spoken_of = sum(request.known - 1 for request in again if request.n_out)
                on_the_way = sum(request.known - 1 for request in again if not request.n_out)  # computed, perhaps
                kill(pid(handle(placed, role)))
                until(placed, lambda lost=before: (placed.counters - lost).workers_lost == 1)  # before hand-overs
        done = finish(placed, orders, before)
        assert outs(orders) == wanted()
    assert (done.workers_lost, done.restarts) == (1, len(again))
    if role == moment:
        assert again
    if role == moment == "decode":
        assert 0 < spoken_of <= done.recomputed <= spoken_of + on_the_way


def test_killed_again_and_again(placed: Router) -> None:
    before, orders = placed.counters, start(placed, PROMPTS, MIXED)
    for i in range(4):
        until(placed, lambda goal=45 * i: placed.supervisor.ready and spoken(orders) > goal)
        oldest = processes(placed)[0]  # prefill and decode by turns
        if i == 1:  # at least this one has tokens that somebody must compute again
            catch_decoding(placed, oldest)
        kill(oldest)
        until(placed, lambda lost=i + 1: (placed.counters - before).workers_lost == lost)  # or the dead are killed
    done = finish(placed, orders, before)
    assert outs(orders) == wanted()
    assert done.workers_lost == 4 and done.restarts > 0 and done.recomputed > 0


# ---- stopped
@pytest.mark.parametrize("role", [draw(__name__).choice(["prefill", "decode"])])
def test_a_stopped_worker_is_taken_for_dead(placed: Router, role: str) -> None:
    before, rows_before = placed.counters, rows(placed)
    orders = start(placed, PROMPTS, MIXED)
    until(placed, lambda: decoding(placed) if role == "decode" else rows(placed) > rows_before)
    victim = handle(placed, role)
    stop(pid(victim))
    placed.timeouts = Timeouts(handoff=CALM.handoff, silence=3.0, start=CALM.start)
    try:
        until(placed, lambda: victim not in placed.handles)
    finally:
        placed.timeouts = CALM
    assert gone(pid(victim))
    done = finish(placed, orders, before)
    assert outs(orders) == wanted()
    assert done.workers_lost == 1


def test_workers_that_pause_are_waited_for(placed: Router) -> None:
    before, orders = placed.counters, start(placed, PROMPTS, MIXED)
    until(placed, lambda: decoding(placed))
    with frozen(processes(placed)):
        steps(placed, 40)
    done = finish(placed, orders, before)
    assert outs(orders) == wanted()
    assert (done.workers_lost, done.restarts, done.recomputed) == (0, 0, 0)


# ---- the fork server
def test_workers_outlive_their_fork_server_and_one_that_does_not_answer_is_replaced(placed: Router) -> None:
    before, first = placed.counters, fork_server(placed)
    kill(first.pid)
    orders = start(placed, PROMPTS, MIXED)
    until(placed, lambda: decoding(placed))
    assert (placed.counters - before).workers_lost == 0
    kill(pid(handle(placed, "decode")))
    done = finish(placed, orders, before)
    assert outs(orders) == wanted()
    assert done.workers_lost == 1

    before, second = placed.counters, fork_server(placed)
    assert second is not first and second.alive
    orders = start(placed, PROMPTS, MIXED)
    until(placed, lambda: decoding(placed))
    stop(second.pid)
    kill(pid(handle(placed, "decode")))
    placed.timeouts = Timeouts(handoff=CALM.handoff, silence=CALM.silence, start=2.0)
    try:
        until(placed, lambda: fork_server(placed) is not second)
    finally:
        placed.timeouts = CALM
    assert gone(second.pid)
    done = finish(placed, orders, before)
    assert outs(orders) == wanted()
    assert done.workers_lost == 2  # it, and one that was never born


# ---- links that are full
def test_kv_that_finds_no_room_is_recomputed(placed: Router) -> None:
    """The kernel refuses the prefill worker every file that is not empty, as where the buffer is full."""
    sender = pid(handle(placed, "prefill"))
    limit = resource.prlimit(sender, resource.RLIMIT_FSIZE)
    for most, restarts in ((0, len(PROMPTS)), (limit[0], 0)):
        resource.prlimit(sender, resource.RLIMIT_FSIZE, (most, limit[1]))
        before, orders = placed.counters, start(placed, PROMPTS, MIXED)
        done = finish(placed, orders, before)
        assert outs(orders) == wanted()
        assert (done.handoffs, done.restarts, done.workers_lost) == (len(PROMPTS) - restarts, restarts, 0)
    assert done.kv_bytes_exposed < done.kv_bytes_sent, "nothing was sent while prompts were computed"


def test_orders_that_fill_the_socket_hold_up_nobody(placed: Router) -> None:
    never = tuple(range(1 << 20, (1 << 20) + 30_000))  # outside the vocabulary: 270 kB in each message
    params = [Params(8, stop_tokens=never, ignore_eos=True)] * len(PROMPTS)
    before, line = placed.counters, handle(placed, "prefill").connection
    with frozen([line.pid]):
        orders = start(placed, PROMPTS, params)
        steps(placed, 20)
        assert line.pending
    done = finish(placed, orders, before)
    assert outs(orders) == tiny.plain(PROMPTS, tiny.greedy(8))
    assert (done.handoffs, done.restarts, done.workers_lost) == (len(PROMPTS), 0, 0)


# ---- another placement
def test_splitwise_may_lose_either_side() -> None:
    placed = started("splitwise:prompt=1,token=1,deadline=120", {"schedule": CHUNKS}, prefix_cache=False)
    try:
        before, orders = placed.counters, start(placed, PROMPTS, MIXED)
        for lost, (role, goal) in enumerate((("prompt", 0), ("token", 60), ("prompt", 120)), 1):
            until(placed, lambda goal=goal: placed.supervisor.ready and spoken(orders) > goal)
            kill(pid(handle(placed, role)))
            until(placed, lambda lost=lost: (placed.counters - before).workers_lost == lost)  # or the dead are killed
        done = finish(placed, orders, before)
        assert outs(orders) == wanted()
        assert done.workers_lost == 3 and done.restarts > 0
    finally:
        placed.close()
    assert segments(placed) == []
