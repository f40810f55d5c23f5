"""What servers add to steps: found again in a server made of numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from phasewise.bench.latency import Served
from phasewise.bench.prompts import random_prompts
from phasewise.bench.workloads import Shot
from phasewise.cli import main
from phasewise.plan.beside import both
from phasewise.plan.cost import Step
from phasewise.plan.profile import Grid, Profile
from phasewise.plan.serving import PROMPTS, STREAMS, Asking, Serving, decodes, prompt
from phasewise.request.trace import Trace
from tests.plan.scenes import Linear

COST = Linear(5e-3, 1e-4, 4e-4)
LAG, STEP, PREFILL, DECODE = 3e-3, 7e-4, 1.25, 1.5


@dataclass
class Numbers:
    """A server in closed form: prompts of one token in time slots of their own, all others decode together."""

    lag: float = LAG
    step: float = STEP
    asked: int = 0

    def __call__(self, shots: Sequence[Shot]) -> list[Served]:
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
        return [Served(served[id(shot)], len(shot.prompt)) for shot in shots]


def test_what_was_added_is_found_again() -> None:
    found = Asking(Numbers(), random_prompts(64, 0), COST).measure(workers=True)
    assert (found.lag, found.step) == (pytest.approx(LAG), pytest.approx(STEP))
    assert found.beside["prefill"]["decode"] == pytest.approx(PREFILL)
    assert found.beside["decode"]["prefill"] == pytest.approx(DECODE, rel=0.02)


def test_one_engine_has_nobody_beside_it() -> None:
    numbers = Numbers()
    found = Asking(numbers, random_prompts(64, 0), COST).measure(workers=False)
    assert found.beside == {} and found.lag == pytest.approx(LAG)
    assert numbers.asked == 4 + 6 * len(PROMPTS) + sum(STREAMS)


def test_a_server_that_is_faster_than_its_steps_adds_nothing() -> None:
    found = Asking(Numbers(lag=-1e-3, step=-1e-3), random_prompts(64, 0), COST).measure(workers=False)
    assert found == Serving(0.0, 0.0, {})


def test_steps_that_are_asked_for_are_whole_prompts_and_decodes() -> None:
    assert prompt(32) == Step(prefill_rows=32, pairs=32 * 33 / 2, prefixes=32, ended=32, emits=1)
    assert decodes(4, 10.5) == Step(decode_rows=4, context=42, emits=4)


def test_factors_of_a_server_go_before_those_of_mere_neighbours() -> None:
    raw: Any = {"prefill": {"prefill": 1.1, "decode": 1.2}, "decode": {"decode": 1.3}}
    assert both(raw, {"prefill": {"decode": 2.0}}) == {
        "prefill": {"prefill": 1.1, "decode": 2.0},
        "decode": {"decode": 1.3},
    }


def test_profiles_ask_real_servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one engine, and with workers where these have the threads that were measured."""
    monkeypatch.setattr("phasewise.plan.profile.QUICK", Grid((8, 16), (1, 3), (0, 64), 1))
    monkeypatch.setattr("phasewise.bench.bandwidth.reading", lambda rounds: 1e9)
    path = tmp_path / "p.json"
    with pytest.raises(SystemExit) as ended:
        main(["profile", "--quick", "--out", str(path)])
    assert not ended.value.code
    served = Profile.load(path).served
    assert served["engine"].beside == {} and served["engine"].lag >= 0.0
    if "workers" in served:
        assert served["workers"].beside["prefill"]["decode"] >= 1.0
