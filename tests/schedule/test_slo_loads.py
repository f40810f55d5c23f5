"""Whole loads in a simulator: how many requests meet their targets, by scheduler."""

from __future__ import annotations

import random
from typing import Any

import pytest

from phasewise.methods.schedule.prefill_first import PrefillFirst
from phasewise.methods.schedule.sarathi import Sarathi
from phasewise.methods.schedule.slo import Slo
from phasewise.request.params import SLO
from tests.schedule.jobs import Job, simulate

Kind = tuple[float, tuple[int, int], int, SLO]  # share of the requests, prompt lengths, output length, targets
LOADS: dict[str, tuple[float, list[Kind]]] = {
    "chats beside documents": (5.0, [(0.7, (50, 400), 60, SLO(1.0, 0.06)), (0.3, (1000, 3000), 100, SLO())]),
    "two deadlines": (4.0, [(0.5, (50, 300), 40, SLO(0.5, 0.1)), (0.5, (500, 3000), 40, SLO(8.0, 0.1))]),
    "overload": (6.0, [(1.0, (50, 1500), 60, SLO(2.0, 0.06))]),
}


def arrivals(load: str, seed: int, n: int = 120) -> list[Job]:
    rate, kinds = LOADS[load]
    draw, at, jobs = random.Random(seed), 0.0, []
    for i in range(n):
        at += draw.expovariate(rate)
        (_, prompts, new, slo), = draw.choices(kinds, [kind[0] for kind in kinds])  # fmt: skip
        jobs.append(Job(f"j{i}", draw.randint(*prompts), draw.randint(new // 2, new * 3 // 2), arrived=at, slo=slo))
    return jobs


def met(job: Job) -> bool:
    tpot = (job.stamps[-1] - job.stamps[0]) / max(1, len(job.stamps) - 1)
    in_time = job.slo.ttft is None or job.stamps[0] - job.arrived <= job.slo.ttft
    return in_time and (job.slo.tpot is None or tpot <= job.slo.tpot)


@pytest.mark.parametrize("load", LOADS)
def test_more_targets_are_met_than_by_those_who_do_not_look(load: str) -> None:
    """Steps of a machine like a small accelerator's, 15 % of noise; the same requests for everybody."""

    def good(policy: Any) -> float:
        noise, share = random.Random(5), []
        for seed in (1,):
            jobs = arrivals(load, seed)
            simulate(policy, jobs, cost=lambda n: (0.015 + 0.0002 * n) * noise.lognormvariate(0, 0.15), steps=100_000)
            share += [met(job) for job in jobs if job.slo != SLO()]
        return sum(share) / len(share)

    mine = good(Slo(budget=512))
    assert mine > (0.97 if load != "overload" else 0.5)
    assert mine > 0.2 + max(good(other) for other in (Sarathi(budget=512), Sarathi(budget=128), PrefillFirst()))
