"""Scheduling by targets: worked plans, and what it promises to each kind of request."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phasewise.errors import UserError
from phasewise.methods.schedule.sarathi import Sarathi
from phasewise.methods.schedule.slo import AIM, LEAST, LOST, Slo
from phasewise.request.header import request_of
from phasewise.request.params import SLO
from phasewise.request.request import Request
from phasewise.verbs.schedule import Scheduler
from tests import oracle, tiny
from tests.schedule.jobs import Job, decoding, rows, simulate

A, B = 1.0, 0.1  # seconds of a step of n rows: A + B n


def line(n: int) -> float:
    return A + B * n


def informed(**knobs: Any) -> Any:
    """A policy that has seen how long steps take."""
    policy = Slo(**knobs).bind(None)
    for n in (1, 400) * 50:
        policy.latency.observe(n, line(n))
    return policy


def stream(name: str, ahead: float, tpot: float | None, tokens: int = 10) -> Job:
    """A decode whose next token is due `ahead` seconds after time 100 if it is to keep `tpot`."""
    job = decoding(name)
    job.out, job.slo = tokens, SLO(tpot=tpot)
    job.computed = job.known - 1
    first = 100.0 + ahead - tokens * AIM * (tpot or 0.0)
    job.stamps = [first, *[99.0] * (tokens - 1)]
    return job


def prompt(name: str, n: int, due: float | None = None) -> Job:
    """A prompt whose first token is due at time `due`; it came at time 90."""
    return Job(name, n, arrived=90.0, slo=SLO(ttft=None if due is None else due - 90.0))


def plan(policy: Scheduler, *jobs: Job) -> dict[str, int]:
    """What these jobs bring at time 100."""
    return {work.job.name: work.rows for work in policy.plan(jobs, 100.0)}


def test_an_idle_engine_is_not_taken_for_a_slow_one() -> None:
    policy = Slo().bind(None)
    first, second = Job("P", 8, new=1), Job("Q", 8, new=1)
    policy.plan([first], 0.0)
    policy.plan([first], 2.0)
    assert policy.latency(8) == 2.0
    policy.plan([second], 500.0)  # who was there has left: nobody knows since when
    assert policy.latency.steps == 1


# ---- without targets
shapes_of = st.lists(
    st.tuples(st.integers(1, 60), st.integers(1, 8), st.integers(0, 30), st.integers(0, 3)), min_size=1, max_size=12
)


@settings(max_examples=40, deadline=None)
@given(shapes_of, st.integers(1, 40))
def test_without_targets_it_is_sarathi(shapes: list[tuple[int, int, int, int]], budget: int) -> None:
    def run(policy: Any) -> list[list[tuple[str, Any]]]:
        jobs = [Job(f"j{i}", p, n, arrives=a, guesses=g) for i, (p, n, a, g) in enumerate(shapes)]
        return [list(step.items()) for step in simulate(policy, jobs, cost=line)]

    assert run(Slo(budget=budget)) == run(Sarathi(budget=budget))


# ---- one step, by hand
def test_prompts_go_by_deadline_as_long_as_they_can_make_it() -> None:
    """Each of 200 rows and a budget of 300: A takes 21 seconds alone, B and C as well."""
    late, soon, lost, free = prompt("A", 200, 150), prompt("B", 200, 122), prompt("C", 200, 118), prompt("D", 200)
    assert plan(informed(budget=300), late, soon, lost) == {"C": 75, "B": 200, "A": 25}
    assert plan(informed(budget=300), late, soon, free) == {"D": 75, "B": 200, "A": 25}
    assert plan(informed(budget=300), free, lost, late) == {"D": 100, "A": 200}
    assert plan(informed(budget=300), lost, free) == {"C": 200, "D": 100}  # in order of arrival
    assert plan(informed(budget=300), free) == {"D": 200}
    assert plan(Slo(budget=300).bind(None), late, soon, lost) == {"C": 200, "B": 100}  # it knows no better yet


def test_what_a_prompt_still_needs_counts_and_not_what_it_had() -> None:
    """B could not make it from its beginning, but most of it is done."""
    other, begun = prompt("A", 200, 130), prompt("B", 400, 115)
    assert plan(informed(budget=200), other, begun) == {"B": 50, "A": 150}
    begun.computed = 300
    assert plan(informed(budget=200), other, begun) == {"B": 100, "A": 100}


def test_a_decode_with_time_lends_its_row_to_prompts_in_need() -> None:
    ahead, pressed, free = stream("ahead", 25.0, 2.0), stream("pressed", 21.0, 2.0), stream("free", 9.0, None)
    assert plan(informed(budget=100), ahead, pressed, free, prompt("P", 200, 124)) == {"pressed": 1, "free": 1, "P": 98}
    assert plan(informed(budget=100), ahead, pressed, free, prompt("P", 200, 300)) == {
        "pressed": 1, "free": 1, "ahead": 1, "P": 97,
    }  # fmt: skip
    assert plan(informed(budget=300), ahead, prompt("P", 200, 128)) == {"P": 200, "ahead": 1}  # room for both


def test_a_step_is_as_long_as_the_decodes_can_wait() -> None:
    """A step of 31 rows takes 4.1 seconds."""
    policy = informed(budget=400)
    assert plan(policy, stream("A", 4.1, 3.0), prompt("P", 500))["P"] == pytest.approx(30, abs=1)
    assert plan(policy, stream("A", 4.1, 3.0), stream("B", 2.0, 3.0), prompt("P", 500))["P"] == pytest.approx(8, abs=1)
    assert plan(policy, stream("A", 4.1, None), prompt("P", 500))["P"] == 399


def test_prompts_may_always_lengthen_a_step_by_half() -> None:
    """Whatever the targets: the decode alone takes 1.1 seconds."""
    more = (LEAST - 1) * 1.1 / B
    assert plan(informed(budget=400), stream("A", 1.2, 0.1), prompt("P", 500))["P"] == pytest.approx(more, abs=1)
    assert plan(informed(budget=4), stream("A", 1.2, 0.1), prompt("P", 500)) == {"A": 1, "P": 3}


def test_nobody_waits_for_a_decode_that_is_lost() -> None:
    tpot = 2.0
    policy = informed(budget=400)
    behind, lost = stream("A", -(LOST - 1) * tpot, tpot), stream("A", -(LOST + 1) * tpot, tpot)
    assert plan(policy, behind, prompt("P", 500))["P"] < 10
    assert plan(policy, lost, prompt("P", 500)) == {"A": 1, "P": 399}  # it runs all the same


def test_a_decode_that_waits_for_its_first_token_has_its_prompts_deadline() -> None:
    """Methods that denoise blocks decode for a while before they emit anything."""
    job = Job("A", 4, arrived=90.0, computed=4, slo=SLO(ttft=60.0), guesses=3)
    assert plan(informed(budget=100), job, prompt("P", 300, 140)) == {"P": 100}
    job.slo = SLO(ttft=25.0)
    assert plan(informed(budget=100), job, prompt("P", 300, 140)) == {"A": 3, "P": 97}


# ---- promises
slos = st.tuples(st.one_of(st.none(), st.floats(0, 80)), st.one_of(st.none(), st.floats(0, 8)))
jobs_of = st.lists(
    st.tuples(st.integers(1, 60), st.integers(1, 8), st.floats(0, 60), st.integers(0, 3), slos),
    min_size=1, max_size=12,
)  # fmt: skip
costs: list[Callable[[int], float]] = [line, lambda n: 0.0, lambda n: 1.0, lambda n: 0.001 * n * n]


@settings(max_examples=60, deadline=None)
@given(jobs_of, st.integers(1, 40), st.sampled_from([0.01, 0.25, 1.0]), st.sampled_from(costs))
def test_bounds_hold_for_any_targets(
    shapes: list[tuple[int, int, float, int, Any]], budget: int, share: float, cost: Callable[[int], float]
) -> None:
    jobs = [Job(f"j{i}", p, n, arrived=a, guesses=g, slo=SLO(*slo)) for i, (p, n, a, g, slo) in enumerate(shapes)]

    def watch(live: list[Job], step: dict) -> None:
        got = rows(step)
        decodes = [job for job in live if not job.prefilling]
        assert sum(got.values()) <= max(budget, sum(got.get(job.name, 0) for job in decodes))
        for job in decodes:
            if job.slo.tpot is None and job.stamps:
                assert got[job.name] == job.rows, "a decode without a target waits"
        if sum(job.rows for job in live) <= budget and all(job.slo.tpot is None for job in live):
            assert got == {job.name: job.rows for job in live}, "room is left although somebody wants it"

    simulate(Slo(budget=budget, share=share), jobs, cost=cost, watch=watch, steps=5_000)
    assert all(job.done for job in jobs), "somebody starves"


def flood(policy: Any, steps: int, slo: SLO, ttft: float) -> Job:
    """A prompt with targets `slo` among prompts that come without end and want every row; `ttft` is their target."""
    victim = Job("victim", 100, new=3, slo=slo)
    others = [Job(f"j{i}", 16, new=1, arrives=i, arrived=i * 2.0, slo=SLO(ttft=ttft)) for i in range(steps)]
    simulate(policy, [victim, *others], cost=lambda n: 2.0, steps=steps)
    return victim


@pytest.mark.parametrize(
    ("slo", "ttft"),
    [(SLO(), 1e6), (SLO(ttft=0.5), 1e6), (SLO(ttft=40.0), 10.0)],
    ids=["no target", "lost from the beginning", "lost on the way"],
)
def test_what_is_lost_moves_on_with_every_step_and_never_starves(slo: SLO, ttft: float) -> None:
    """Others want 16 rows a step for ever; a quarter of them is enough for 100 rows in 25 steps of 2 seconds."""
    victim = flood(Slo(budget=16), 60, slo, ttft)
    assert victim.done and victim.stamps[0] <= 2.0 * 25 + (slo.ttft or 0.0)
    selfish = Slo(budget=16).bind(None)
    selfish.share = 0.0  # which the knob does not allow
    assert not flood(selfish, 600, slo, ttft).stamps


def test_age_decides_among_the_lost() -> None:
    jobs = [Job(f"j{i}", 40, new=1, arrived=float(i), slo=SLO(ttft=0.5)) for i in range(12)]
    jobs += [Job(f"k{i}", 40, new=1, arrived=20.0 + i, slo=SLO(ttft=1e6)) for i in range(12)]
    simulate(Slo(budget=20), jobs, cost=lambda n: 1.0)
    first = [job.stamps[0] for job in jobs]
    assert first[:12] == sorted(first[:12])


def test_a_stream_that_lends_keeps_its_mean() -> None:
    """Prompts in need take what they can; a stream with a target of 5 seconds a token still keeps it, and no less."""
    jobs = [Job("stream", 4, new=40, slo=SLO(tpot=5.0))]
    jobs += [Job(f"p{i}", 60, new=2, arrived=10.0 + 8 * i, slo=SLO(ttft=60.0, tpot=5.0)) for i in range(20)]
    gaps = {}
    for name, policy in (("slo", Slo(budget=200)), ("sarathi", Sarathi(budget=200))):
        for job in jobs:
            job.computed, job.out, job.stamps = 0, 0, []
        simulate(policy, jobs, cost=line)
        gaps[name] = [(job.stamps[-1] - job.stamps[0]) / (len(job.stamps) - 1) for job in jobs]
    assert max(gaps["slo"]) <= 5.0 < max(gaps["sarathi"])


@pytest.mark.parametrize("knobs", [{"budget": 0}, {"share": 0.0}, {"share": 1.5}])
def test_bad_knobs_are_named(knobs: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=next(iter(knobs))):
        Slo(**knobs)


# ---- in the engine
@pytest.mark.parametrize(
    ("verbs", "pace"),
    [({}, 0.01), ({"draft": "draft_model:model=tiny-draft,k=3"}, 0.0), ({"evict": "streaming:window=9"}, 3.0)],
)
def test_tokens_do_not_depend_on_targets(verbs: dict[str, str], pace: float) -> None:
    """Whatever the clock says and whoever is late."""
    given = tiny.prompts(40, 3, 25, 61, 12)
    want = tiny.plain(given, tiny.greedy(10), {"schedule": "prefill_first"} | verbs)
    draw, now = random.Random(3), 0.0

    def clock() -> float:
        nonlocal now
        now += pace * draw.random()
        return now

    placed = tiny.engine({"schedule": "slo:budget=7"} | verbs, clock=clock)
    targets = [SLO(), SLO(0.001, 0.001), SLO(20.0, 1.0), SLO(ttft=1e6), SLO(tpot=200.0)]
    requests = [Request(p, tiny.greedy(10), slo=slo) for p, slo in zip(given, targets)]
    for request in requests:
        placed.add(request)
    tiny.finish(placed, requests)
    assert tiny.outs(requests) == want
    if not verbs:
        assert requests[2].out == oracle.greedy(tiny.checkpoint(), given[2], 10)[0]


def test_a_later_request_with_a_deadline_overtakes() -> None:
    now = 0.0

    def clock() -> float:
        return now

    first: dict[str, list[str]] = {}
    for schedule in ("slo:budget=16", "sarathi:budget=16"):
        now, order = 0.0, []
        placed = tiny.engine({"schedule": schedule}, clock=clock, prefix_cache=False)
        patient, hurried = (
            Request(p, tiny.greedy(2), id=name, slo=slo)
            for p, name, slo in zip(tiny.prompts(90, 30), ("patient", "hurried"), (SLO(ttft=100.0), SLO(ttft=8.0)))
        )
        placed.add(patient)
        placed.step()
        placed.add(hurried)
        while not (patient.left and hurried.left):
            now += 1.0
            order += [r.id for r in placed.step() if r.n_out == 1]
        first[schedule] = order
    assert first["slo:budget=16"] == ["hurried", "patient"]
    assert first["sarathi:budget=16"] == ["patient", "hurried"]


def test_targets_and_times_move_with_a_request() -> None:
    """What decodes elsewhere is the same request to that engine's scheduler: its targets, and when its tokens came."""
    placed = tiny.engine({"schedule": "slo:budget=8", "place": "disaggregated"})
    given = tiny.prompts(20, 31)
    requests = [Request(p, tiny.greedy(12), slo=SLO(ttft=9.0, tpot=0.5)) for p in given]
    for request in requests:
        placed.add(request)
    tiny.finish(placed, requests)
    assert tiny.outs(requests) == tiny.plain(given, tiny.greedy(12))
    there = request_of(requests[0].header())
    assert (there.slo, there.known) == (requests[0].slo, requests[0].known)
    assert (there.first_token, there.last_token) == (requests[0].first_token, requests[0].last_token)


def test_every_engine_learns_for_itself() -> None:
    one, two = (tiny.engine({"schedule": "slo"}) for _ in range(2))
    tiny.run(one, tiny.prompts(5), tiny.greedy(4))
    assert one.parts.schedule.latency.steps > 0 == two.parts.schedule.latency.steps
