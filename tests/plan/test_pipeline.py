"""Stages that each have a part of the layers: steps follow each other through them, against closed forms."""

from __future__ import annotations

from itertools import repeat
from random import Random
from statistics import fmean

import pytest

from phasewise.bench.workloads import Fixed, Lognormal
from phasewise.errors import UserError
from phasewise.kv.buffer import Ledger
from phasewise.plan.arrivals import Load
from phasewise.plan.cost import StepWork
from phasewise.plan.device import device
from phasewise.plan.link import Link
from phasewise.plan.roofline import Roofline
from phasewise.plan.search import Choice, SearchSpace
from phasewise.plan.sequence import SimulatedRequest, SimulatedSequence
from phasewise.plan.setting import known
from phasewise.plan.shape import DecoderShape
from phasewise.plan.simulate import run
from phasewise.plan.simulated_engine import EngineSettings, SimulatedEngine
from phasewise.request.params import SLO
from tests.plan.scenarios import ROW, Linear, in_turn, scenario, scheduler
from tests.plan.test_simulate import ONE, PLACES, mean_ttft, prompts, settled

LLAMA_8B = DecoderShape(32, 4096, 32, 8, 128, 14336, 128256)


@pytest.mark.parametrize(("stages", "rate"), [(2, 1.5), (4, 2.8)])
def test_prompts_wait_as_at_one_server_that_is_as_fast_as_a_stage(stages: int, rate: float) -> None:
    """DistServe (arXiv 2401.09670): a prompt takes D whatever it waits for, and waits as where prompts take D / K."""
    outcome = run(scenario(Linear(1.0), schedule=ONE, stages=stages), prompts(500, rate))
    waits = [seconds - 1 / stages for seconds in in_turn(outcome.jobs, repeat(1 / stages))]
    assert [job.ttft for job in outcome.jobs] == pytest.approx([1.0 + seconds for seconds in waits])


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_decodes_are_divided_among_the_stages(stages: int) -> None:
    """Eight streams: each step takes a share of them, and as many steps are under way as there are stages."""
    jobs = [SimulatedRequest(str(i), range(i * 100, i * 100 + 8), 400, 0.0) for i in range(8)]
    outcome = run(scenario(Linear(0.01, 0.001), stages=stages), jobs)
    settled(outcome)
    assert fmean(job.tpot or 0.0 for job in jobs) == pytest.approx(0.01 + 0.001 * 8 / stages, rel=0.03)
    assert outcome.numbers()["busy_share"] == pytest.approx(1.0, abs=0.05)


def test_a_lone_request_is_not_faster() -> None:
    for stages in (1, 4):
        job = SimulatedRequest("a", range(100), 11, 0.0)
        run(scenario(Linear(0.01, 0.001), stages=stages), [job])
        assert job.ttft == pytest.approx(0.11)
        assert job.tpot == pytest.approx(0.011)


def test_no_step_overtakes_another() -> None:
    """A short step behind a long one leaves each stage after it: the long one ends at 1, the short one 0.05 later."""
    long, short = SimulatedRequest("a", range(1000), 2, 0.0), SimulatedRequest("b", range(5000, 5100), 2, 0.0)
    run(scenario(Linear(0.0, 0.001), schedule="prefill_first:budget=1000", stages=2), [long, short])
    assert (long.first_token, short.first_token) == (pytest.approx(1.0), pytest.approx(1.05))


def test_everybody_is_served_although_memory_is_short_and_workers_die_with_steps_under_way() -> None:
    """Who is preempted while his step is under way starts again, and no row counts twice."""
    load, rng = Load(Lognormal(), 100, 40.0), Random(0)
    deaths = [(rng.uniform(0.0, 2.0), rng.randrange(4)) for _ in range(5)]
    made = scenario(
        Linear(0.005, 1e-4), PLACES[1], kv_bytes=12_000 * ROW, link=Link(20e6, 0.01), deaths=deaths, stages=2
    )
    outcome = run(made, load.jobs(SLO()))
    settled(outcome)
    assert outcome.numbers()["workers_lost"] == 5
    alone = run(
        scenario(Linear(0.005, 1e-4), schedule="slo", kv_bytes=8_000 * ROW, stages=3), load.jobs(SLO(0.5, 0.05))
    )
    settled(alone)
    assert alone.numbers()["preemptions"] > 0


def test_stages_hold_a_part_of_the_layers_and_pass_rows_on() -> None:
    one, four = Roofline(device("h100"), LLAMA_8B), Roofline(device("h100"), LLAMA_8B, stages=4)
    step = StepWork(prefill_rows=4096, pairs=4096 * 4097 / 2, prefixes=4096, emits=1)
    h100 = device("h100")
    hops = 3 * (4096 * 4096 * 2 / h100.link + h100.latency)
    assert four.seconds(step) == pytest.approx(one.seconds(step) + 3 * h100.overhead + hops)
    assert four.kv_bytes == pytest.approx(4 * h100.memory - LLAMA_8B.weight_bytes)
    assert four.price(step).money == pytest.approx(one.price(step).money * four.seconds(step) / one.seconds(step))


def test_a_model_that_is_too_large_for_one_device_fits_in_stages() -> None:
    large = DecoderShape(80, 8192, 64, 8, 128, 28672, 32000)
    with pytest.raises(UserError, match="share them among at least 2"):
        Roofline(device("h100"), large)
    assert Roofline(device("h100"), large, stages=2).kv_bytes > 0
    with pytest.raises(UserError, match="stages=3 does not divide 80 layers"):
        Roofline(device("h100"), large, stages=3)
    with pytest.raises(UserError, match="has no steps in stages"):
        known({"": "aiconfigurator:h100_sxm/trtllm"}, 1, large, 2)


def test_stages_are_devices() -> None:
    space = SearchSpace(4, ("colocated",), ("sarathi",), ways=(1, 2, 4), stages=(1, 2, 4))
    assert [(one.ways, one.stages) for one in space.choices()] == [(1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (4, 1)]
    assert str(Choice("colocated", "sarathi", ways=2, stages=4)) == "colocated, sarathi, 2 devices per stage, 4 stages"


def test_more_stages_carry_a_higher_rate_of_prompts() -> None:
    """As many as there are stages, at nearly the same TTFT: the trade that DistServe's search makes."""
    load = Load(Fixed(100, 1), 500, 8.0)
    one, two = (run(scenario(Linear(0.1, 0.001), schedule=ONE, stages=n), load.jobs(SLO())) for n in (1, 2))
    assert mean_ttft(one) > 2.0  # it cannot keep up
    assert mean_ttft(two) < 0.4


def test_who_was_preempted_while_a_step_was_under_way_gets_nothing_from_it() -> None:
    """Its memory is another one by then, in which the step's rows are not."""
    engine = SimulatedEngine(EngineSettings(scheduler("sarathi"), ROW, 16, stages=2), Linear(1.0), Ledger(1 << 30))
    job = SimulatedSequence(SimulatedRequest("a", range(100), 4, 0.0), 0)
    engine.add(job)
    assert engine.begin(0.0) == (0.5, 1.0)
    job.release()
    job.computed = 0
    job.kv = engine.store.open(job, 101)
    assert engine.finish(1.0) == [] and (job.computed, job.known) == (0, 100)
    assert engine.begin(1.0) == (1.5, 2.0)
    assert engine.finish(2.0) == [job] and (job.computed, job.known) == (100, 101)
