"""n samples of one prompt: one prefill, then every sibling on its own, whatever becomes of the parent."""

from __future__ import annotations

import pytest

from phasewise.engine.invariants import check
from phasewise.request.params import Params
from phasewise.request.request import Request
from tests import tiny
from tests.engine.engines import alone, break_decode, sampled, step_all

(PROMPT,) = tiny.prompts(40)


def family(engine: tiny.Placed, n: int = 3, params: Params | None = None) -> list[Request]:
    parent = Request(PROMPT, params or sampled(6), id="p")
    requests = [parent, *(parent.sibling(i) for i in range(1, n))]
    for request in requests:
        engine.add(request)
    return requests


def all_as_if_alone(requests: list[Request]) -> None:
    assert tiny.outs(requests) == [alone(request) for request in requests]


def test_one_prefill_serves_all() -> None:
    engine = tiny.engine(prefix_cache=False)
    requests = family(engine)
    step_all(engine, requests)
    all_as_if_alone(requests)
    assert len({tuple(r.out) for r in requests}) > 1
    assert engine.counters.rows == 40 + 3 * 5


@pytest.mark.parametrize(
    ("schedule", "max_tokens"), [("sarathi:budget=7", 1), ("prefill_first", 2), ("layered:rows_per_group=11", 6)]
)
def test_any_schedule_and_length(max_tokens: int, schedule: str) -> None:
    engine = tiny.engine({"schedule": schedule})
    requests = family(engine, params=sampled(max_tokens))
    step_all(engine, requests)
    all_as_if_alone(requests)


def test_as_many_siblings_as_rows() -> None:
    """The rows drawn from are then as many as those of the step, and not they."""
    engine = tiny.engine({"schedule": "sarathi:budget=8"})
    requests = family(engine, n=8)  # the last slice of the 40 tokens has as many rows
    step_all(engine, requests)
    all_as_if_alone(requests)


@pytest.mark.parametrize("after", [0, 2, 4, 7])
def test_a_parent_cancelled_before_or_after_the_fork(after: int) -> None:
    engine = tiny.engine({"schedule": "sarathi:budget=10"})
    parent, *siblings = family(engine)
    for _ in range(after):
        engine.step()
    assert engine.cancel(parent)
    check(engine)
    step_all(engine, siblings)
    all_as_if_alone(siblings)
    assert parent.left.how == "cancelled" and parent.out == alone(parent)[: parent.n_out]


@pytest.mark.parametrize("after", [0, 4, 5])
def test_a_sibling_cancelled_before_or_after_the_fork(after: int) -> None:
    engine = tiny.engine({"schedule": "sarathi:budget=10"})
    parent, doomed, other = family(engine)
    for _ in range(after):
        engine.step()
    assert engine.cancel(doomed)
    step_all(engine, [parent, other])
    all_as_if_alone([parent, other])


@pytest.mark.parametrize("verb", ["propose", "accept"])
def test_a_parent_that_fails_leaves_its_siblings_to_themselves(verb: str) -> None:
    engine = tiny.engine({"schedule": "sarathi:budget=10"})
    parent, *siblings = family(engine)
    break_decode(engine, [verb], {"p"})
    step_all(engine, [parent, *siblings])
    assert parent.left.how == "failed"
    all_as_if_alone(siblings)


def test_a_parent_preempted_before_the_fork() -> None:
    engine = tiny.engine({"schedule": "sarathi:budget=10"})
    requests = family(engine)
    engine.step()
    engine.room.preempt(requests[0])
    check(engine)
    step_all(engine, requests)
    all_as_if_alone(requests)
    assert engine.counters.prefix_hits == 0  # the siblings waited for the second prefill and forked


def test_a_parent_preempted_after_the_fork() -> None:
    engine = tiny.engine(prefix_cache=False)
    requests = family(engine)
    engine.step()
    engine.step()
    engine.room.preempt(requests[0])
    check(engine)
    step_all(engine, requests)
    all_as_if_alone(requests)


def test_a_sibling_that_comes_late_does_not_wait_and_takes_none_of_the_parents_tokens() -> None:
    engine = tiny.engine()
    parent = Request(PROMPT, sampled(12))
    engine.add(parent)
    for _ in range(4):
        engine.step()
    late = parent.sibling(1)
    engine.add(late)
    engine.step()
    assert late.n_out == 1
    engine.room.preempt(parent)
    step_all(engine, [parent, late])
    all_as_if_alone([parent, late])


def test_a_sibling_of_a_parent_that_never_comes() -> None:
    engine = tiny.engine()
    orphan = Request(PROMPT, sampled(5)).sibling(3)
    engine.add(orphan)
    step_all(engine, [orphan])
    all_as_if_alone([orphan])


def test_a_prompt_that_is_cached_but_for_its_last_row_forks_too() -> None:
    (prompt,) = tiny.prompts(33)  # one block of the prefix cache, and a row
    engine = tiny.engine()
    first = Request(prompt, sampled(3))
    engine.add(first)
    while first.left is None:
        engine.step()
    parent = Request(prompt, sampled(5, seed=9))
    requests = [parent, parent.sibling(1)]
    for request in requests:
        engine.add(request)
    rows = engine.counters.rows
    engine.step()
    assert engine.counters.rows - rows == 1 and [r.n_out for r in requests] == [1, 1]
    step_all(engine, requests)
    all_as_if_alone(requests)


@pytest.mark.parametrize("max_running", [1, 3])
def test_forks_keep_to_the_limit_of_running_requests(max_running: int) -> None:
    engine = tiny.engine(max_running=max_running)
    requests = family(engine, n=5)

    def within() -> None:
        assert len(engine.running) <= max_running

    step_all(engine, requests, within)
    all_as_if_alone(requests)


def test_forks_that_outgrow_the_budget_are_recomputed() -> None:
    row = tiny.engine().store.row_bytes
    engine = tiny.engine(kv_bytes=64 * row * 3, prefix_cache=False)  # three slabs of 64 rows for five samples
    requests = family(engine, n=5, params=sampled(10))
    step_all(engine, requests)
    all_as_if_alone(requests)
    assert engine.counters.preemptions > 0
