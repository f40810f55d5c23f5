"""What servers add to steps: found again in a server made of numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from phasewise.bench.latency import ServedRequest
from phasewise.bench.prompts import random_prompts
from phasewise.bench.workloads import Shot
from phasewise.cli import main
from phasewise.plan.beside import both, over
from phasewise.plan.cost import StepWork
from phasewise.plan.profile import Grid, Profile
from phasewise.plan.serving import AMONG, PROMPTS, ROUNDS, STREAMS, Asking, Serving, decodes, prompt, rising
from phasewise.request.trace import Trace
from tests.plan.scenarios import Linear

COST = Linear(5e-3, 1e-4, 4e-4)
LAG, STEP, PREFILL, DECODE = 3e-3, 7e-4, 1.25, 1.5


@dataclass
class Numbers:
    """A server in closed form: prompts of one token in time slots of their own, all others decode together."""

    lag: float = LAG
    step: float = STEP
    asked: int = 0

    def __call__(self, shots: Sequence[Shot]) -> list[ServedRequest]:
        self.asked += len(shots)
        streams = [shot for shot in shots if shot.new > 1]
        slower = PREFILL if streams else 1.0
        served: dict[int, Trace] = {}
        busy = []
        for shot in shots:
            if shot.new == 1:
                end = shot.arrival + self.lag + slower * COST.seconds(prompt(len(shot.prompt)))
                served[id(shot)] = Trace(shot.arrival, tokens=[end], counts=[1])
                busy.append((shot.arrival, end))
        for shot in streams:
            now, trace = shot.arrival, Trace(shot.arrival)
            for _ in range(shot.new):
                beside = any(start <= now < end for start, end in busy)
                alone = COST.seconds(decodes(len(streams), 1.0)) + self.step
                now += alone * (DECODE if beside else 1.0)
                trace.emitted(now, 1)
            served[id(shot)] = trace
        return [ServedRequest(served[id(shot)], len(shot.prompt)) for shot in shots]


def test_what_was_added_is_found_again() -> None:
    found = Asking(Numbers(), random_prompts(64, 0), COST).measure(workers=True)
    assert (found.lag, found.step) == (pytest.approx(LAG), pytest.approx(STEP))
    assert found.beside["prefill"]["decode"] == pytest.approx(PREFILL)
    assert found.beside["decode"]["prefill"] == pytest.approx(DECODE, rel=0.02)


@dataclass
class Together:
    """A server in closed form: whoever has come is in the next step, prompts whole, and every step takes what it costs
    and what `served` adds to it."""

    served: Serving
    asked: int = 0

    def __call__(self, shots: Sequence[Shot]) -> list[ServedRequest]:
        self.asked += len(shots)
        now, traces = 0.0, [Trace(shot.arrival) for shot in shots]
        while left := [i for i, shot in enumerate(shots) if len(traces[i].tokens) < shot.new]:
            there = [i for i in left if shots[i].arrival + self.served.lag <= now]
            if not there:
                now = min(shots[i].arrival for i in left) + self.served.lag
                continue
            step = StepWork()
            for i in there:
                if traces[i].tokens:
                    step = replace(step, decode_rows=step.decode_rows + 1, context=step.context + 1)
                else:
                    step = replace(step, prefill_rows=step.prefill_rows + len(shots[i].prompt))
            step = replace(step, emits=len(there))
            now += COST.seconds(step) + self.served.added(step, sum(not traces[i].tokens for i in there))
            for i in there:
                traces[i].emitted(now, 1)
        return [ServedRequest(trace, len(shot.prompt)) for trace, shot in zip(traces, shots, strict=True)]


@pytest.mark.parametrize("served", [Serving(3e-3, 7e-4, 2e-4, 4e-3), Serving(0.0, 0.0, 1e-4, 1e-3), Serving(1e-3)])
def test_one_engine_has_nobody_beside_it(served: Serving) -> None:
    together = Together(served)
    found = Asking(together, random_prompts(64, 0), COST).measure(workers=False)
    assert found.beside == {} and found.lag == pytest.approx(served.lag, abs=1e-9)
    assert (found.step, found.token) == (pytest.approx(served.step), pytest.approx(served.token))
    assert found.request == pytest.approx(served.request, rel=0.05, abs=1e-4)
    assert together.asked == 4 + ROUNDS * (6 * len(PROMPTS) + sum(STREAMS) + 4 + AMONG)


def test_tokens_and_requests_delay_steps_with_decodes_alone() -> None:
    served = Serving(1.0, 0.1, 0.01, 0.5)
    assert served.added(StepWork(prefill_rows=8, emits=1), 1) == 0.0
    assert served.added(StepWork(prefill_rows=8, decode_rows=3, emits=4), 1) == pytest.approx(0.1 + 0.04 + 0.5)


def test_a_line_that_rises_has_no_part_below_zero() -> None:
    assert rising([(1, 3.0, 1.0), (2, 5.0, 1.0), (4, 9.0, 1.0)]) == (pytest.approx(1.0), pytest.approx(2.0))
    assert rising([(1, 2.0, 1.0), (2, 1.0, 1.0)]) == (pytest.approx(1.5), 0.0)  # falls: the best flat one
    assert rising([(1, 0.0, 1.0), (2, 2.0, 1.0)]) == (0.0, pytest.approx(0.8))  # through zero: the best steep one
    assert rising([(1, -1.0, 1.0), (8, -2.0, 1.0)]) == (0.0, 0.0)
    sure, unsure = rising([(1, 1.0, 1.0), (2, 2.0, 1.0), (3, 9.0, 1e6)]), rising([(1, 1.0, 1.0), (2, 2.0, 1.0)])
    assert sure == (pytest.approx(unsure[0], abs=1e-6), pytest.approx(unsure[1], abs=1e-6))


def test_a_server_that_is_faster_than_its_steps_adds_nothing() -> None:
    found = Asking(Numbers(lag=-1e-3, step=-1e-3), random_prompts(64, 0), COST).measure(workers=False)
    assert found == Serving()


def test_steps_that_are_asked_for_are_whole_prompts_and_decodes() -> None:
    assert prompt(32) == StepWork(prefill_rows=32, pairs=32 * 33 / 2, prefixes=32, ended=32, emits=1)
    assert decodes(4, 10.5) == StepWork(decode_rows=4, context=42, emits=4)


def test_factors_of_a_server_go_before_those_of_mere_neighbours() -> None:
    raw: Any = {"prefill": {"prefill": 1.1, "decode": 1.2}, "decode": {"decode": 1.3}}
    assert both(raw, {"prefill": {"decode": 2.0}}) == {
        "prefill": {"prefill": 1.1, "decode": 2.0},
        "decode": {"decode": 1.3},
    }


def test_who_shares_cores_in_a_server_bears_its_work_too() -> None:
    shared: Any = {"prefill": {"decode": 1.9}, "decode": {"prefill": 1.1}}
    alone: Any = {"prefill": {"decode": 1.1}}
    served: Any = {"prefill": {"decode": 1.21}, "decode": {"prefill": 1.05}}
    found = over(shared, served, alone)
    assert found["prefill"]["decode"] == pytest.approx(1.9 * 1.1)
    assert found["decode"]["prefill"] == pytest.approx(1.1 * 1.05)
    assert over(shared, {}, alone) == shared  # nothing is known of a server: it makes nobody faster


def test_profiles_ask_real_servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one engine, and with workers where these have the threads that were measured."""
    monkeypatch.setattr("phasewise.plan.profile.QUICK", Grid((8, 16), (1, 3), (0, 64), 1))
    monkeypatch.setattr("phasewise.bench.bandwidth.reading", lambda rounds: 1e9)
    for name, few in {"ROUNDS": 1, "EACH": 2, "AMONG": 4, "NEW": 16, "STREAMS": (1, 2), "PROMPTS": (16, 32)}.items():
        monkeypatch.setattr(f"phasewise.plan.serving.{name}", few)
    path = tmp_path / "p.json"
    with pytest.raises(SystemExit) as ended:
        main(["profile", "--quick", "--out", str(path)])
    assert not ended.value.code
    served = Profile.load(path).served
    assert served["engine"].beside == {} and served["engine"].lag >= 0.0
    if "workers" in served:
        assert served["workers"].beside["prefill"]["decode"] >= 1.0
