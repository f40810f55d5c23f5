"""From `add` to the one way out: errors of the caller, cancellation, preemption, and budgets with no slack."""

from __future__ import annotations

import pytest

from phasewise.engine.invariants import check
from phasewise.errors import UserError
from phasewise.request.params import Params
from phasewise.request.request import Request
from tests import oracle, tiny
from tests.engine.engines import alone, sampled, step_all

SLAB = 64 * tiny.engine().store.row_bytes


# ---- errors of the caller
@pytest.mark.parametrize(
    ("prompt", "params", "words"),
    [
        ([], Params(), "the prompt is empty"),
        ([5, 64], Params(), r"token id 64 .* \[0, 64\)"),
        ([5, -1], Params(), "token id -1"),
        ([5] * 1024, Params(), "1024 tokens, but the model's context is 1024.*at most 1023"),
        ([5] * 300, Params(max_tokens=700), "raise --kv-bytes or lower max_tokens"),
    ],
)
def test_what_can_never_run_is_refused(prompt: list[int], params: Params, words: str) -> None:
    engine = tiny.engine(kv_bytes=10 * SLAB)
    with pytest.raises(UserError, match=words):
        engine.add(Request(prompt, params))
    check(engine)
    assert engine.idle


def test_an_id_is_used_once_at_a_time() -> None:
    engine = tiny.engine()
    first = Request([5, 6], tiny.greedy(3), id="me")
    engine.add(first)
    second = Request([5, 6], tiny.greedy(3), id="me")
    with pytest.raises(UserError, match="'me' is already running"):
        engine.add(second)
    assert not engine.cancel(second)  # it never was here, whatever its name
    step_all(engine, [first])
    assert first.left.how == "finished"
    with pytest.raises(UserError, match="has already left: make a new Request"):
        engine.add(first)
    engine.add(second)  # the name is free again
    step_all(engine, [second])


def test_max_tokens_is_cut_to_the_context() -> None:
    of = tiny.model(context=96)
    engine = tiny.engine(of=of)
    (request,) = tiny.run(engine, tiny.prompts(90), Params(max_tokens=500, ignore_eos=True))
    assert request.n_out == 6 and request.left.reason == "length"


# ---- ways out
@pytest.mark.parametrize(
    ("schedule", "after"),
    [("sarathi:budget=8", 0), ("sarathi:budget=8", 2), ("sarathi:budget=8", 5), ("layered:rows_per_group=5", 1),
     ("layered:rows_per_group=5", 3), ("prefill_first", 9)],
)  # fmt: skip
def test_cancelling_at_any_moment_frees_everything_at_once(after: int, schedule: str) -> None:
    engine = tiny.engine({"schedule": schedule}, prefix_cache=False)
    doomed, other = (Request(p, tiny.greedy(5)) for p in tiny.prompts(20, 9))
    engine.add(doomed)
    engine.add(other)
    for _ in range(after):
        engine.step()
        check(engine)
    had_left = doomed.left is not None
    assert engine.cancel(doomed) != had_left
    assert not engine.cancel(doomed)
    assert doomed.kv is None and not doomed.state
    check(engine)
    step_all(engine, [other])
    assert other.out == alone(other)


def test_a_stop_token_ends_a_request_and_is_its_last() -> None:
    (prompt,) = tiny.prompts(12)
    full = oracle.greedy(tiny.checkpoint(), prompt, 12)[0]
    stop = full[7]
    request = Request(prompt, Params(max_tokens=12, stop_tokens=(stop,), ignore_eos=True))
    engine = tiny.engine()
    engine.add(request)
    step_all(engine, [request])
    assert request.out == full[: full.index(stop) + 1] and request.left.reason == "stop"


def test_step_reports_who_got_tokens_or_left() -> None:
    engine = tiny.engine({"schedule": "sarathi:budget=10"})
    short, long = (Request(p, tiny.greedy(2)) for p in tiny.prompts(4, 25))
    engine.add(short)
    engine.add(long)
    assert engine.step() == [short]  # and 6 rows of the long prompt
    assert engine.step() == [short] and short.left
    assert engine.step() == [long]
    assert engine.step() == [long]
    assert engine.step() == [] and engine.idle


# ---- memory
def test_rows_computed_twice_are_counted_once_for_each_time() -> None:
    engine = tiny.engine({"schedule": "sarathi:budget=8"}, prefix_cache=False)
    request = Request(tiny.prompts(30)[0], tiny.greedy(6))
    engine.add(request)
    for _ in range(2):
        engine.step()
    engine.room.preempt(request)  # 16 rows done
    engine.step()
    engine.room.preempt(request)  # 8 of them done again
    step_all(engine, [request])
    assert engine.counters.recomputed == 8 + 16
    assert engine.counters.rows == 30 + 5 + engine.counters.recomputed
    assert engine.counters.preemptions == 2
    assert request.out == alone(request)


def test_rows_back_from_the_prefix_cache_are_not_recomputed() -> None:
    engine = tiny.engine()
    request = Request(tiny.prompts(70)[0], tiny.greedy(6))
    engine.add(request)
    for _ in range(3):
        engine.step()
    engine.room.preempt(request)
    step_all(engine, [request])
    assert engine.counters.prefix_hits == 64
    assert engine.counters.recomputed == 70 + 2 - 64
    assert request.out == alone(request)


def test_a_cancelled_request_recomputes_nothing() -> None:
    engine = tiny.engine()
    request = Request(tiny.prompts(30)[0], tiny.greedy(6))
    engine.add(request)
    engine.step()
    engine.room.preempt(request)
    engine.cancel(request)
    check(engine)
    assert engine.counters.recomputed == 0


@pytest.mark.parametrize(
    ("schedule", "prefix_cache"), [("sarathi:budget=16", True), ("layered:rows_per_group=16", False)]
)
def test_the_smallest_budget_that_add_accepts_is_enough(prefix_cache: bool, schedule: str) -> None:
    """Each request alone may need the whole budget: they preempt each other, and all of them finish."""
    engine = tiny.engine({"schedule": schedule}, kv_bytes=4 * SLAB, prefix_cache=prefix_cache)
    requests = [Request(p, sampled(60, seed=i)) for i, p in enumerate(tiny.prompts(120, 124, 90, 132))]
    for request in requests:
        engine.add(request)
    step_all(engine, requests)
    assert engine.counters.preemptions > 0
    assert engine.store.ledger.limit == 4 * SLAB
    for request in requests:
        assert request.left.reason == "length" and request.out == alone(request)


def test_preemption_takes_the_youngest_first() -> None:
    engine = tiny.engine(kv_bytes=4 * SLAB, prefix_cache=False)
    old, young = (Request(p, tiny.greedy(80)) for p in tiny.prompts(60, 60))
    engine.add(old)
    engine.add(young)
    while engine.counters.preemptions == 0:
        engine.step()
        check(engine)
    assert young.kv is None and old.kv is not None
    step_all(engine, [old, young])
    assert [old.out, young.out] == [alone(old), alone(young)]


def test_a_request_that_grows_beyond_any_budget_fails_by_name() -> None:
    """`add` makes this impossible for exact memory; a method that takes more than it said must not hang the engine."""
    engine = tiny.engine(kv_bytes=4 * SLAB, prefix_cache=False)
    request = Request(tiny.prompts(60)[0], tiny.greedy(60))
    engine.add(request)
    engine.step()
    engine.store.ledger.limit = 2 * SLAB - 1
    for _ in range(80):
        engine.step()
    assert request.left.how == "failed" and "raise --kv-bytes" in request.left.reason
    assert engine.idle and engine.kv_bytes == 0


def test_a_promise_takes_room_until_it_is_given_back() -> None:
    engine = tiny.engine(kv_bytes=4 * SLAB)
    assert engine.room.promise(3 * SLAB) and not engine.room.promise(2 * SLAB)
    check(engine)
    request = Request(tiny.prompts(70)[0], tiny.greedy(4))
    engine.add(request)
    for _ in range(3):
        engine.step()
    assert request in engine.waiting  # two slabs are wanted, one is free
    engine.room.promise(-3 * SLAB)
    step_all(engine, [request])
    assert request.left.how == "finished"


def test_a_request_waits_for_memory_that_will_come_back() -> None:
    engine = tiny.engine(kv_bytes=4 * SLAB, prefix_cache=False)
    request = Request(tiny.prompts(60)[0], tiny.greedy(30))
    engine.add(request)
    engine.step()
    assert engine.room.promise(3 * SLAB)
    for _ in range(20):
        engine.step()
        check(engine)
    assert request.left is None and request.computed == 64  # the next row needs another slab
    engine.room.promise(-3 * SLAB)
    step_all(engine, [request])
    assert request.out == alone(request) and engine.counters.preemptions == 0


def test_a_request_lets_go_of_its_own_cached_prefix_before_it_fails() -> None:
    """Its slab and the cached copy of its prompt fill the budget: the copy is what it can do without."""
    engine = tiny.engine(kv_bytes=4 * SLAB)
    request = Request(tiny.prompts(120)[0], tiny.greedy(60))
    engine.add(request)
    engine.step()
    assert engine.prefix_bytes == 1.5 * SLAB and engine.kv_bytes == 3.5 * SLAB
    step_all(engine, [request])
    assert request.out == alone(request) and engine.counters.preemptions == 0
