"""The simulator against closed forms: queues (M/D/1, M/M/1), stalls, transfers, hand-offs, failures, memory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise, repeat
from random import Random
from statistics import fmean

import numpy
import pytest

from phasewise.bench.workloads import Fixed, Lognormal, Shared
from phasewise.errors import UserError
from phasewise.plan.arrivals import Load
from phasewise.plan.beside import Beside, slowed
from phasewise.plan.cost import StepWork
from phasewise.plan.link import Link
from phasewise.plan.sequence import SimulatedRequest
from phasewise.plan.serving import Serving
from phasewise.plan.simulate import LoadOutcome, capacity, goodput, run
from phasewise.request.params import SLO
from tests.plan.scenarios import ROW, Linear, in_turn, scenario

PLACES = ["disaggregated:prefill=2,decode=2", "disaggregated:prefill=2,decode=2,transfer=push",
          "splitwise:prompt=2,token=2,mixed=1", "semi_pd"]  # fmt: skip
ONE = "prefill_first:budget=1"  # one prompt per step: a queue with one server


def prompts(n: int, rate: float, seed: int = 1, new: int = 1) -> list[SimulatedRequest]:
    return Load(Fixed(8, new), n, rate, seed=seed).jobs(SLO())


def mean_ttft(outcome: LoadOutcome) -> float:
    return fmean(job.ttft or 0.0 for job in outcome.jobs)


# ---- closed forms
@pytest.mark.parametrize("load", [0.3, 0.9])
def test_prompts_wait_for_one_server_in_turn(load: float) -> None:
    """As in the M/D/1 queue of DistServe (arXiv 2401.09670)."""
    outcome = run(scenario(Linear(1.0), schedule=ONE), prompts(500, load))
    assert [job.ttft for job in outcome.jobs] == pytest.approx(in_turn(outcome.jobs, repeat(1.0)))


@pytest.mark.parametrize(
    ("beside", "last", "ttft"),
    [
        ({}, 1.95, 0.95),
        ({"decode": {"prefill": 2.0}}, 2.45, 0.95),
        ({"decode": {"decode": 9.0}}, 1.95, 0.95),
        ({"prefill": {"decode": 2.0}}, 1.95, 1.9),
    ],
)
def test_steps_take_longer_beside_busy_neighbours(
    beside: dict[str, dict[str, float]], last: float, ttft: float
) -> None:
    """Ten tokens of 0.1 s each from 0.95 s on; from 1 s on another worker has a prompt, which takes 0.95 s alone."""
    made = scenario(Linear(0.1, prompt=0.85 / 8), "disaggregated", beside=beside)
    jobs = [SimulatedRequest("a", range(8), 11, 0.0), SimulatedRequest("b", range(8), 1, 1.0)]
    outcome = run(made, jobs)
    assert outcome.jobs[0].last_token == pytest.approx(last)
    assert outcome.jobs[1].ttft == pytest.approx(ttft)


@pytest.mark.parametrize(
    ("shared", "last", "ttft"),
    [({}, 2.85, 1.9), ({"prefill": {"decode": 1.2}, "decode": {"prefill": 1.5}}, 2.35, 1.14)],
)
def test_who_shares_a_core_takes_turns_or_what_was_measured(
    shared: dict[str, dict[str, float]], last: float, ttft: float
) -> None:
    """The same two requests where both workers have one core between them, and no memory to wait for besides."""
    apart: Beside = {"prefill": {"decode": 7.0}, "decode": {"prefill": 7.0}}
    made = scenario(Linear(0.1, prompt=0.85 / 8), "semi_pd:window=1e9", cores=1, beside=apart, shared=shared)
    outcome = run(made, [SimulatedRequest("a", range(8), 11, 0.0), SimulatedRequest("b", range(8), 1, 1.0)])
    assert outcome.jobs[0].last_token == pytest.approx(last)
    assert outcome.jobs[1].ttft == pytest.approx(ttft)


def test_a_servers_own_work_delays_who_decodes() -> None:
    """Five tokens of 0.1 s, each 0.03 s later for the step and its token; a prompt of another comes into the second of
    these steps, and delays it by its token and itself: 0.42 s. Who is alone with a prompt waits for nobody."""
    made = scenario(Linear(0.1), served=Serving(step=0.01, token=0.02, request=0.4))
    outcome = run(made, [SimulatedRequest("a", range(8), 6, 0.0), SimulatedRequest("b", range(8), 1, 0.15)])
    assert outcome.jobs[0].ttft == pytest.approx(0.1)
    assert outcome.jobs[0].last_token == pytest.approx(0.1 + 5 * 0.13 + 0.42)
    assert outcome.jobs[1].ttft == pytest.approx(0.23 + 0.13 + 0.42 - 0.15)


def test_factors_of_neighbours_multiply_and_steps_of_both_phases_are_prompts() -> None:
    table: Beside = {"prefill": {"prefill": 2.0, "decode": 1.5}, "decode": {"prefill": 3.0}}
    assert slowed(table, "mixed", ["decode", "mixed", "prefill"]) == 1.5 * 2 * 2
    assert slowed(table, "decode", ["mixed", "decode"]) == 3.0
    assert slowed(table, "prefill", []) == slowed({}, "decode", ["prefill"]) == 1.0
    assert slowed(table, "decode", ["prefill", "decode"], unknown=2.0) == 3.0 * 2


def test_each_replica_serves_the_requests_that_are_dealt_to_it() -> None:
    outcome = run(scenario(Linear(1.0), schedule=ONE, replicas=4), prompts(500, 2.0))
    dealt = Random(0)
    queues = [dealt.randrange(4) for _ in outcome.jobs]
    for number in range(4):
        own = [job for job, queue in zip(outcome.jobs, queues) if queue == number]
        assert len(own) > 90 and [job.ttft for job in own] == pytest.approx(in_turn(own, repeat(1.0)))


def test_a_stream_waits_for_a_chunk_or_for_a_whole_prompt() -> None:
    """Sarathi-Serve: with seconds a + b * rows, chunks of tau rows stall a stream by a + b * tau at most."""
    a, b, tau, long = 0.01, 1e-4, 64, 2000
    gaps = {}
    for schedule in ("sarathi:budget=64", "prefill_first"):
        stream = SimulatedRequest("s", range(4), 3, 0.0)
        other = SimulatedRequest("p", range(9000, 9000 + long), 1, 0.005)
        run(scenario(Linear(a, b), schedule=schedule), [stream, other])
        assert stream.tpot is not None
        gaps[schedule] = 2 * stream.tpot  # its two gaps together
    assert gaps["sarathi:budget=64"] == pytest.approx(2 * (a + b * tau))
    assert gaps["prefill_first"] == pytest.approx((a + b * long) + 2 * (a + b))  # the stall, and two tokens


@pytest.mark.parametrize("schedule", ["sarathi:budget=64", "prefill_first"])
def test_times_between_tokens_are_those_of_their_steps(schedule: str) -> None:
    """A stream of 41 tokens, beside whose second step on a prompt of 2,000 rows comes: every step is a gap."""
    a, b = 0.01, 1e-4
    slo = SLO(tbt=1.0)
    stream = SimulatedRequest("s", range(4), 41, 0.0, slo)
    other = SimulatedRequest("p", range(9000, 11000), 1, 0.005, slo)
    outcome = run(scenario(Linear(a, b), schedule=schedule), [stream, other])
    chunks, stall = divmod(2000, 63), a + b * 2000
    decodes = [a + b] * 39
    steps = [*[a + 64 * b] * chunks[0], a + b * (chunks[1] + 1)] + [a + b] * (39 - chunks[0])
    expected = steps if schedule.startswith("sarathi") else [a + b + stall, *decodes]
    assert sorted(stream.tbt) == pytest.approx(sorted(expected), abs=1e-9)
    assert stream.waited == 0.0 and other.tbt == []
    assert outcome.numbers()["tbt_p99_s"] == pytest.approx(numpy.quantile(expected, 0.99))
    met = [stream.meets(SLO(tbt=tail)) for tail in (a + 65 * b, 0.2)]
    assert met == ([True, True] if schedule.startswith("sarathi") else [False, True])


@pytest.mark.parametrize("place", ["colocated", *PLACES])
def test_times_of_tokens_survive_moves_and_deaths(place: str) -> None:
    """One time per token, rising, from the first token to the last."""
    deaths = [] if place in ("colocated", "semi_pd") else [(0.3, 0), (0.7, 3), (1.1, 1)]
    made = scenario(Linear(0.005, 1e-4), place, kv_bytes=8_000 * ROW, deaths=deaths)
    for job in run(made, Load(Lognormal(), 60, 40.0).jobs(SLO(tbt=0.1))).jobs:
        times = job.stamps.tokens
        assert times is not None and len(times) == job.new and times == sorted(times)
        assert times[-1] == job.last_token and (deaths or times[0] == job.first_token)


@pytest.mark.parametrize("tbt", [0.05, 1.0])
def test_capacity_is_the_highest_rate_within_tail_and_queue(tbt: float) -> None:
    """By the definition, at the rate that is found and a bit above it."""
    load, made = Load(Fixed(400, 20), 200, 1.0), scenario(Linear(0.01, 1e-4), schedule="prefill_first")

    def holds(rate: float) -> bool:
        jobs = run(made, load.jobs(SLO(tbt=1.0), rate)).jobs
        waits = sorted((job.stamps.begun or 0.0) - job.arrived for job in jobs)
        gaps = [b - a for job in jobs for a, b in pairwise(job.stamps.tokens or ())]
        return bool(numpy.quantile(gaps, 0.99) <= tbt and numpy.median(waits) <= 0.5)

    best = capacity(made, load, tbt, delay=0.5)
    assert best.bounded and best.rate > 0.1 and holds(best.rate) and not holds(best.rate / 0.97)


def test_a_tight_tail_is_carried_by_chunks_and_not_by_whole_prompts() -> None:
    """A whole prompt takes 0.05 s, a chunk of 64 rows 0.0164 s."""
    load = Load(Fixed(400, 20), 200, 1.0)
    chunks, whole = (
        capacity(scenario(Linear(0.01, 1e-4), schedule=name), load, 0.02).rate
        for name in ("sarathi:budget=64", "prefill_first")
    )
    assert chunks > 4 * whole
    assert capacity(scenario(Linear(0.01, 1e-4)), load, 0.005).rate < 1e-5, "a step alone takes longer"


@pytest.mark.parametrize("slow", [0.25, 4.0])
def test_transfers_take_what_splitwise_says(slow: float) -> None:
    """Serialised, L * t_x lie bare; layer by layer, t_x of it, or all that the layers' compute does not hide."""
    layers, compute, rows = 16, 0.01, 64
    per_layer = slow * compute
    link = Link(rows * ROW / layers / per_layer)
    schedule = f"layered:rows_per_group={rows // layers}"
    for transfer, bare in (("pull", layers * per_layer), ("push", per_layer if slow <= 1 else None)):
        job = SimulatedRequest("a", range(rows), 4, 0.0)
        place = f"disaggregated:transfer={transfer}"
        outcome = run(scenario(Linear(compute), place, schedule=schedule, link=link), [job])
        expected = compute + layers * per_layer - layers * compute if bare is None else bare
        assert job.trace.handoff == pytest.approx(expected)
        assert job.first_token == pytest.approx(layers * compute)
        assert outcome.numbers()["kv_bytes_sent"] == rows * ROW  # every row once


def test_goodput_is_the_highest_rate_at_which_enough_requests_meet_their_target() -> None:
    """A prompt takes a second, and nobody may wait."""
    load = Load(Fixed(8, 1), 300, 1.0)

    def share(rate: float) -> float:
        found = in_turn(load.jobs(SLO(), rate), repeat(1.0))
        return sum(seconds <= 1.0 + 1e-6 for seconds in found) / len(found)

    best = goodput(scenario(Linear(1.0), schedule=ONE), load, SLO(1.0 + 1e-6))
    assert best.bounded and best.share == share(best.rate) >= 0.9 > share(best.rate / 0.97)


def test_targets_that_no_rate_meets_have_no_goodput() -> None:
    best = goodput(scenario(Linear(1.0), schedule=ONE), Load(Fixed(8, 1), 100, 1.0), SLO(0.5))
    assert best.rate < 1e-5


# ---- nothing is lost, and nothing stays behind
def settled(outcome: LoadOutcome) -> None:
    assert all(job.finished and job.n_out == job.new for job in outcome.jobs)
    for cluster in outcome.clusters:
        handles = [] if cluster.router is None else cluster.router.handles
        assert cluster.router is None or cluster.router.idle
        for numbers in handles:
            assert (numbers.prefilling, numbers.decoding, numbers.promised, numbers.coming) == (0, 0, 0, 0)
        for worker in cluster.workers:
            assert not (worker.jobs or worker.offers or worker.pushes or worker.inbox or worker.arrivals)
            assert worker.engine.room.promised == worker.state["untold"] == 0
            worker.engine.prefixes.clear()
            assert worker.engine.ledger.used == 0


@pytest.mark.parametrize(
    ("place", "schedule"),
    zip(
        ["colocated", *PLACES], ["slo", "sarathi:budget=256", "layered:rows_per_group=64", "slo", "sarathi:budget=256"]
    ),
)
def test_everybody_is_served_and_all_memory_comes_back(place: str, schedule: str) -> None:
    """With memory for a few requests at once, so that some wait and some are preempted."""
    load = Load(Lognormal(), 100, 40.0)
    made = scenario(Linear(0.005, 1e-4), place, schedule=schedule, kv_bytes=8_000 * ROW)
    settled(run(made, load.jobs(SLO(0.5, 0.05))))


@pytest.mark.parametrize("place", PLACES[:3])
def test_workers_may_die_at_any_time(place: str) -> None:
    rng = Random(place)
    deaths = [(rng.uniform(0.0, 2.0), rng.randrange(4)) for _ in range(5)]
    link = Link(20e6, 0.01)
    made = scenario(Linear(0.005, 1e-4), place, link=link, deaths=deaths)
    outcome = run(made, Load(Lognormal(), 100, 40.0).jobs(SLO()))
    settled(outcome)
    numbers = outcome.numbers()
    assert numbers["workers_lost"] == 5 and numbers["restarts"] > 0


def test_full_decoders_stop_new_prompts() -> None:
    """Pull: what is done waits in the prompt worker's memory, until that is full too."""
    made = scenario(Linear(0.01), "disaggregated:share=0.5", kv_bytes=2 * 640 * ROW)
    seen = []

    def watch(done: int) -> None:
        seen.append(done)

    jobs = [SimulatedRequest(str(i), range(i * 1000, i * 1000 + 100), 100, 0.0) for i in range(300)]
    outcome = run(made, jobs, watch)
    settled(outcome)
    assert seen == [256]
    first = sorted(job.first_token or 0.0 for job in jobs)
    assert first[-1] > 50 * first[0]  # prompts alone would be done within a few steps


def test_prefixes_are_found_and_make_way() -> None:
    load = Load(Shared(prefix=256, prompt=32, new=4), 50, 5.0)
    outcome = run(scenario(Linear(0.01, 1e-3), prefix_cache=True), load.jobs(SLO()))
    settled(outcome)
    assert outcome.numbers()["prefix_hits"] == 49 * 256
    assert mean_ttft(outcome) < mean_ttft(run(scenario(Linear(0.01, 1e-3)), load.jobs(SLO()))) / 2
    tight = run(
        scenario(Linear(0.01, 1e-3), prefix_cache=True, kv_bytes=448 * ROW), Load(Fixed(256, 4), 50, 5.0).jobs(SLO())
    )
    settled(tight)


@pytest.mark.parametrize("chunk", [64, 300])
def test_a_prompt_that_is_computed_in_slices_sees_all_that_came_before(chunk: int) -> None:
    """However a prompt is cut, its rows see n (n + 1) / 2 rows in all, and each slice reads what lies before it."""
    seen: list[StepWork] = []

    @dataclass(frozen=True)
    class Noted(Linear):
        def seconds(self, step: StepWork) -> float:
            seen.append(replace(step))
            return super().seconds(step)

    run(scenario(Noted(0.01), schedule=f"sarathi:budget={chunk}"), [SimulatedRequest("a", range(300), 1, 0.0)])
    assert len(seen) == -(-300 // chunk)
    assert sum(step.pairs for step in seen) == 300 * 301 / 2
    assert [step.prefixes for step in seen] == [min(300, chunk * (i + 1)) for i in range(len(seen))]


def test_a_prompt_that_is_cached_whole_still_computes_its_last_row() -> None:
    """There must be a row to draw from: of a prompt of two blocks that came before, one is found."""
    twice = [SimulatedRequest(name, range(64), 1, at) for name, at in (("a", 0.0), ("b", 1.0))]
    outcome = run(scenario(Linear(0.01), prefix_cache=True), twice)
    assert outcome.numbers()["prefix_hits"] == 32


def test_what_can_never_run_fails_and_nobody_else() -> None:
    asked = (("a", range(100), 0.0), ("b", range(2000, 5000), 0.0), ("c", range(100), 0.1))
    jobs = [SimulatedRequest(name, tokens, 4, at) for name, tokens, at in asked]
    outcome = run(scenario(Linear(0.01), kv_bytes=1024 * ROW), jobs)
    assert [job.finished for job in jobs] == [True, False, True]
    assert outcome.share(SLO(10.0)) == pytest.approx(2 / 3) and outcome.numbers()["failed"] == 1


def test_cores_follow_the_targets() -> None:
    """semi_pd's own controller: prompts that miss their target get cores, and more of them are then in time."""
    costs = lambda role, threads: Linear(0.0, 4e-3 / threads)  # noqa: E731 - seconds by cores
    load = Load(Fixed(100, 4), 150, 4.0)
    shares = {}
    for name, window in (("moving", 1.0), ("fixed", 1e9)):
        place = f"semi_pd:slo_ttft=0.4,slo_tpot=0.5,window={window},dwell=1"
        outcome = run(scenario(Linear(1.0), place, costs=costs), load.jobs(SLO()))
        moves = outcome.clusters[0].policy.shares.moves  # type: ignore[union-attr]
        assert (moves > 0) == (name == "moving")
        shares[name] = outcome.share(SLO(0.4))
    assert shares["moving"] > shares["fixed"]


# ---- loads
@pytest.mark.parametrize("cv", [0.5, 3.0])
def test_gamma_gaps_have_the_spread_that_is_asked_for(cv: float) -> None:
    times = [job.arrived for job in Load(Fixed(8, 1), 10_000, 2.0, cv).jobs(SLO())]
    gaps = [b - a for a, b in pairwise(times)]
    mean = fmean(gaps)
    spread = fmean((gap - mean) ** 2 for gap in gaps) ** 0.5
    assert mean == pytest.approx(0.5, rel=0.1) and spread / mean == pytest.approx(cv, rel=0.1)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Load(Fixed(), 3, -1.0).jobs(SLO()), "rate=-1 is not a rate"),
        (lambda: Load(Fixed(), 3, 1.0, 0.0).jobs(SLO()), "cv=0 is no spread"),
        (lambda: Load(Fixed(), 0).jobs(SLO()), "requests=0: a load has at least one"),
        (lambda: Link(0.0), "carries nothing"),
        (lambda: Link(1.0, -1.0), "at least 0"),
        (lambda: run(scenario(Linear(1.0), deaths=[(0.0, 0)]), prompts(1, 1.0)), "one engine has no router"),
        (lambda: run(scenario(Linear(1.0), "splitwise", deaths=[(0.0, 9)]), prompts(1, 1.0)), "worker 9 cannot die"),
        (lambda: run(scenario(Linear(1.0), "semi_pd:cores=9"), prompts(1, 1.0)), "cores=9, but its workers may use 4"),
    ],
)
def test_what_makes_no_sense_is_said(make: object, words: str) -> None:
    with pytest.raises(UserError) as caught:
        make()  # type: ignore[operator]
    assert words in str(caught.value)
