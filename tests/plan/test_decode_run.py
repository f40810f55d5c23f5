"""Runs of decodes that the simulator counts together: every request and counter is what it is step by step."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest

from phasewise import catalog
from phasewise.plan.cost import StepWork
from phasewise.plan.decode_run import DecodeRun
from phasewise.plan.link import Link
from phasewise.plan.sequence import SimulatedRequest, SimulatedSequence
from phasewise.plan.simulate import Scenario, run
from phasewise.request.params import SLO
from tests.plan.scenarios import Linear, scenario

DECODES_ALL = [name for verb, name, cls in catalog.every() if verb == "schedule" and cls.traits.decodes_all]


class Reading(Linear):
    """Decodes take longer the more KV they read."""

    def seconds(self, step: StepWork) -> float:
        return super().seconds(step) + 1e-6 * step.context


def asked(n: int, tbt: float | None) -> list[SimulatedRequest]:
    rng, now, found = Random(11), 0.0, []
    for i in range(n):
        now += rng.expovariate(6.0)
        tokens = range(1000 * i, 1000 * i + rng.randint(5, 300))
        found.append(SimulatedRequest(f"r{i}", tokens, rng.randint(1, 150), now, SLO(1.0, 0.1, tbt)))
    return found


def everything(made: Scenario, tbt: float | None) -> tuple[list[Any], dict[str, Any]]:
    outcome = run(made, asked(60, tbt))
    return [(job.first_token, job.last_token, job.known, job.tbt, job.left) for job in outcome.jobs], outcome.numbers()


@pytest.mark.parametrize("name", DECODES_ALL)
@pytest.mark.parametrize(
    ("place", "more"),
    [
        ("colocated", {}),
        ("colocated", {"kv_bytes": 2000 << 10, "prefix_cache": True}),  # requests are preempted, prefixes make way
        ("splitwise:prompt=1,token=1,mixed=1", {"link": Link(1e6, 0.01), "kv_bytes": 8000 << 10}),
        ("disaggregated:prefill=1,decode=2", {"link": Link(1e6, 0.0), "deaths": ((3.0, 1),)}),
        ("semi_pd", {}),
    ],
)
def test_together_as_step_by_step(name: str, place: str, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    together = scenario(Reading(0.01, row=1e-4), place, schedule=name, **more)
    layout = together.layout
    apart = replace(together, layout=replace(layout, engine=replace(layout.engine, decodes_all=False)))
    runs: list[int] = []
    write = DecodeRun.write
    monkeypatch.setattr(DecodeRun, "write", lambda self: (runs.append(self.steps), write(self)))
    tbt = 0.1 if place == "colocated" else None
    found = everything(together, tbt)
    assert place == "semi_pd" or sum(runs) > 50, "hardly a step was counted together"
    runs.clear()
    assert found == everything(apart, tbt) and not runs
    assert "kv_bytes" not in more or place != "colocated" or found[1]["preemptions"] > 0


@pytest.mark.parametrize("name", DECODES_ALL)
def test_those_schedulers_run_all_decodes(name: str) -> None:
    """What the trait says: with no prompt under way, each step has one row of everybody, in order."""
    made = catalog.build("schedule", name)
    plan = (made.bind(None) if hasattr(made, "bind") else made).plan
    jobs = [SimulatedSequence(SimulatedRequest(str(i), range(8), 4, 0.0), 0) for i in range(700)]
    for job in jobs:
        job.computed, job.known, job.rows, job.prefilling = 8, 9, 1, False
    assert [(work.job, work.rows, work.layers) for work in plan(jobs, 0.0)] == [(job, 1, None) for job in jobs]
