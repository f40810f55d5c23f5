"""Latencies are derived from stamps of the engine's own clock; counters subtract."""

from __future__ import annotations

import pytest

from phasewise.request.counters import Counters
from phasewise.request.params import Params
from phasewise.request.request import Request
from phasewise.request.trace import Trace
from tests import tiny


class Clock:
    """Seconds that pass only when we say so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_latencies_of_a_trace() -> None:
    trace = Trace(10.0)
    assert (trace.queued, trace.ttft, trace.tpot, trace.itl) == (None, None, None, [])
    trace.admitted = 10.5
    trace.emitted(12.0, 1)
    assert (trace.queued, trace.ttft, trace.tpot, trace.itl) == (0.5, 2.0, None, [])
    trace.emitted(12.5, 3)
    trace.emitted(14.0, 1)
    assert trace.itl == [0.5, 1.5]  # gaps between emissions, of however many tokens
    assert trace.tpot == pytest.approx((14.0 - 12.0) / 4)  # per token after the first


def test_times_of_another_clock_are_moved() -> None:
    new, old = Trace(5.0), Trace(5.0)
    for at in (7.0, 7.5, 9.0):
        old.emitted(at, 1)
    tpot = old.tpot
    new.enter(1000.0)
    old.enter(1000.0)
    assert new.arrived == 1000.0
    assert (old.arrived, old.tokens, old.tpot) == (996.0, [998.0, 998.5, 1000.0], tpot)


def test_the_engine_stamps_every_transition() -> None:
    clock = Clock()
    engine = tiny.engine({"schedule": "sarathi:budget=10"}, clock=clock, max_running=1)
    first, second = (Request(p, tiny.greedy(3)) for p in tiny.prompts(25, 4))
    engine.add(first)
    clock.now += 1.0
    engine.add(second)
    while not (first.left and second.left):
        clock.now += 0.25
        engine.step()
    # 25 rows by 10: three steps to the first token, then one each
    assert first.trace.arrived == 100.0 and first.trace.admitted == 101.25
    assert first.trace.tokens == [101.75, 102.0, 102.25] and first.trace.left == 102.25
    assert first.trace.queued == 1.25 and first.trace.ttft == 1.75 and first.trace.tpot == 0.25
    assert second.trace.arrived == 101.0 and second.trace.queued == pytest.approx(1.5)
    assert second.trace.itl == [0.25, 0.25]


def test_a_preempted_request_keeps_its_first_stamps() -> None:
    clock = Clock()
    engine = tiny.engine(clock=clock)
    request = Request(tiny.prompts(12)[0], tiny.greedy(4))
    engine.add(request)
    for _ in range(2):
        clock.now += 1.0
        engine.step()
    engine.room.preempt(request)
    while request.left is None:
        clock.now += 1.0
        engine.step()
    assert request.trace.admitted == 101.0 and request.trace.ttft == 1.0
    assert request.trace.tokens == [101.0, 102.0, 104.0, 105.0]  # the gap is the prompt and the replay


def test_counters_subtract_and_count() -> None:
    before = Counters(rows=3)
    after = Counters(rows=10, steps=2)
    after.count("rows", 5)
    assert (after - before).rows == 12 and (after - before).steps == 2
    assert after.as_dict()["rows"] == 15


def test_emitted_counts_what_requests_took() -> None:
    engine = tiny.engine()
    stop = tiny.run(tiny.engine(), tiny.prompts(9), tiny.greedy(5))[0].out[2]
    requests = tiny.run(engine, tiny.prompts(9, 14), Params(max_tokens=5, stop_tokens=(stop,), ignore_eos=True))
    assert engine.counters.emitted == sum(r.n_out for r in requests)
