"""Splitwise: two workers per request from the start, KV that flows between them, pools that borrow from each other."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phasewise.cluster.phase_pools import pool
from phasewise.cluster.router import Router
from phasewise.errors import UserError
from phasewise.methods.place.splitwise import Splitwise
from phasewise.request.request import Request
from tests import tiny
from tests.cluster.faulty import HEARD, TOLD, Fate, unsteady
from tests.engine.engines import alone, sampled
from tests.engine.test_engine import Arrival, arrivals
from tests.place.links import Clock, check_router, disaggregated, engines, finish
from tests.place.loads import survive
from tests.place.test_push import CHUNKS, FATES, LAYERS, MESSAGES, MIXED, PROMPTS, ROW, SLAB, together
from tests.place.together import methods_of, siblings
from tests.seeds import draw


def splitwise(knobs: str = "", verbs: dict[str, str] | None = None, **options: object) -> Router:
    verbs = {**CHUNKS, **(verbs or {}), "place": "splitwise" + knobs}
    return disaggregated(verbs, **{"clock": Clock(), **options})


def pools(placed: Router) -> list[str]:
    return [pool(handle) for handle in placed.handles]


# ---- colocated's tokens
def same_as_colocated(verbs: dict[str, str]) -> None:
    expected = tiny.plain(PROMPTS, MIXED, verbs)
    placed = splitwise(":prompt=2,token=1,threshold=60", verbs)
    requests = together(placed, MIXED)
    finish(placed, requests)
    assert tiny.outs(requests) == expected
    assert placed.counters.recomputed == tiny.corrected(PROMPTS, MIXED, verbs) and placed.counters.restarts == 0


@pytest.mark.parametrize("options", methods_of(draw(__name__), 3), ids=str)
def test_methods_go_on_where_they_were(options: dict[str, str]) -> None:
    """A few of all methods, others every day; a hand-off of each of them is among the laws (tests/laws)."""
    same_as_colocated(options | draw(__name__).choice([CHUNKS, LAYERS]))


# ---- who does what
def test_two_workers_are_chosen_at_once_and_the_kv_flows_while_the_prompt_runs() -> None:
    placed = splitwise(prefix_cache=False)
    (prompts,), (tokens,) = engines(placed, "prompt"), engines(placed, "token")
    request = Request(PROMPTS[1], tiny.greedy(6))
    placed.add(request)
    assert tokens.room.promised == tokens.kv_bytes == 2 * SLAB
    while request.n_out < 1:
        placed.step()
        check_router(placed)
    assert placed.counters.kv_bytes_sent == 90 * ROW and placed.counters.kv_bytes_exposed == 10 * ROW
    finish(placed, [request])
    assert request.out == alone(request)
    assert (prompts.counters.rows, tokens.counters.rows) == (90, 5)


def test_an_overloaded_prompt_worker_borrows_a_token_worker_which_comes_home() -> None:
    placed = splitwise(":threshold=100", prefix_cache=False)
    (tokens,) = engines(placed, "token")
    requests = together(placed, [tiny.greedy(8)] * 5)  # 40, 90, 5, 64 and 33 tokens; all are full before the last two
    assert [placed.flights[r.id].handle.role for r in requests] == ["prompt", "token", "prompt", "prompt", "token"]
    assert pools(placed) == ["prompt", "mixed"]
    finish(placed, requests)
    assert tiny.outs(requests) == [alone(r) for r in requests]
    assert placed.counters.handoffs == 3  # what the borrowed worker has prefilled stays there
    assert tokens.counters.rows == 90 + 33 + 5 * 7
    assert pools(placed) == ["prompt", "token"]


def test_without_room_at_the_token_worker_a_request_stays_with_its_prompt_worker() -> None:
    placed = splitwise(max_running=2, prefix_cache=False)
    requests = together(placed, [tiny.greedy(8)] * 5)
    assert pools(placed) == ["mixed", "token"]
    late = Request(PROMPTS[0], tiny.greedy(8))
    finish(placed, requests[:2])
    assert pools(placed) == ["prompt", "token"]
    placed.add(late)
    assert placed.flights[late.id].departs
    finish(placed, [*requests, late])
    assert tiny.outs([*requests, late]) == [alone(r) for r in [*requests, late]]
    assert placed.counters.handoffs == 2 + 1


def test_a_mixed_worker_takes_what_overflows() -> None:
    placed = splitwise(":mixed=1,threshold=100", prefix_cache=False)
    requests = together(placed, [tiny.greedy(8)] * 5)
    assert [placed.flights[r.id].handle.role for r in requests] == ["prompt", "mixed", "prompt", "token", "prompt"]
    finish(placed, requests)
    assert tiny.outs(requests) == [alone(r) for r in requests]
    assert pools(placed) == ["prompt", "token", "mixed"]


def test_siblings_fork_where_their_prompt_is() -> None:
    placed = splitwise(prefix_cache=False)
    siblings(placed, PROMPTS[0], finish)
    assert engines(placed, "prompt")[0].counters.rows == 40


# ---- failures
@pytest.mark.parametrize("role", ["prompt", "token"])
@pytest.mark.parametrize("after", [1, 6])
def test_a_worker_may_die_at_any_moment(role: str, after: int) -> None:
    placed = splitwise(":threshold=100", prefix_cache=False)
    requests = together(placed, [sampled(8, seed=i) for i in range(5)])
    for _ in range(after):
        placed.step()
        check_router(placed)
    next(handle for handle in placed.handles if handle.role == role).connection.kill()
    placed.step()
    finish(placed, requests)
    assert tiny.outs(requests) == [alone(r) for r in requests]
    assert placed.counters.workers_lost == 1 and pools(placed) in (["prompt", "token"], ["token", "prompt"])


@settings(max_examples=10, deadline=None)
@given(
    st.lists(arrivals, min_size=1, max_size=7),
    st.lists(st.sampled_from(FATES), min_size=1, max_size=8),
    st.sampled_from([CHUNKS, LAYERS]),
    st.tuples(st.integers(1, 2), st.integers(1, 2), st.integers(0, 1)),
    st.integers(5, 12),
    st.integers(1, 4),
    st.dictionaries(st.integers(0, 40), st.integers(0, 4), max_size=4),
)
def test_random_load_over_a_bad_link_to_mortal_workers(
    load: list[Arrival], fates: list[Fate], schedule: dict[str, str], sizes: tuple[int, int, int], slabs: int,
    max_running: int, deaths: dict[int, int],
) -> None:  # fmt: skip
    clock = Clock()
    prompt, token, mixed = sizes
    placed = splitwise(
        f":prompt={prompt},token={token},mixed={mixed},threshold=60,deadline=10", schedule,
        fate=unsteady(fates),
        kinds=TOLD + HEARD + MESSAGES, clock=clock,
        kv_bytes=slabs * SLAB * sum(sizes), max_running=max_running,
    )  # fmt: skip
    survive(placed, load, deaths, clock)
    finish(placed, [], clock.tick)


@pytest.mark.parametrize("knobs", [{"prompt": 0}, {"token": 0}, {"mixed": -1}, {"threshold": 0}, {"deadline": 0.0}])
def test_bad_knobs_are_named(knobs: dict[str, float]) -> None:
    ((name, value),) = knobs.items()
    with pytest.raises(UserError, match=f"splitwise: {name}={value}"):
        Splitwise(**knobs)
