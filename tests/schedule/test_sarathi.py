"""Sarathi-Serve as numbers: the paper's composition rule, its bounds, and the stall it removes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phasewise.errors import UserError
from phasewise.methods.schedule.prefill_first import PrefillFirst
from phasewise.methods.schedule.sarathi import Sarathi
from tests import tiny
from tests.schedule.jobs import Job, decoding, rows, simulate


def test_a_worked_trace() -> None:
    """Budget 8; A, B, C decode; D has a prompt of 13, E of 4."""
    jobs = [decoding("A"), decoding("B"), decoding("C"), Job("D", 13), Job("E", 4)]
    abc = {"A": 1, "B": 1, "C": 1}
    outs = []
    history = simulate(Sarathi(budget=8), jobs, steps=5, watch=lambda *_: outs.append((jobs[3].out, jobs[4].out)))
    assert [rows(step) for step in history] == [
        abc | {"D": 5},
        abc | {"D": 5},
        abc | {"D": 3, "E": 2},
        abc | {"D": 1, "E": 2},
        abc | {"D": 1, "E": 1},
    ]
    assert outs == [(0, 0), (0, 0), (0, 0), (1, 0), (2, 1)]  # before each step: D emits in the third, E in the fourth


def test_steps_are_filled_to_the_budget_as_in_splitfuse() -> None:
    """FastGen's example: budget 16, three decodes, prompts of 10, 7 and 20."""
    prompts = [Job("P1", 10, new=99), Job("P2", 7, new=99), Job("P3", 20, new=99)]
    jobs = [decoding("A"), decoding("B"), decoding("C"), *prompts]
    history = [rows(step) for step in simulate(Sarathi(budget=16), jobs, steps=5)]
    slices = [{name: n for name, n in step.items() if n > 1 or name == "P3"} for step in history]
    assert slices == [{"P1": 10, "P2": 3}, {"P2": 4, "P3": 8}, {"P3": 11}, {"P3": 1}, {"P3": 1}]
    assert [sum(step.values()) for step in history] == [16, 16, 16, 6, 6]


jobs_of = st.lists(st.tuples(st.integers(1, 60), st.integers(1, 8), st.integers(0, 30)), min_size=1, max_size=12)


@settings(max_examples=60, deadline=None)
@given(jobs_of, st.integers(1, 40), st.data())
def test_no_step_exceeds_the_budget_and_no_decode_waits(
    shapes: list[tuple[int, int, int]], budget: int, data: st.DataObject
) -> None:
    reserve = data.draw(st.integers(0, budget))
    jobs = [Job(f"j{i}", p, n, arrives=a) for i, (p, n, a) in enumerate(shapes)]
    jobs.sort(key=lambda job: job.arrives)

    def watch(live: list[Job], step: dict) -> None:
        decodes = [job for job in live if not job.prefilling]
        assert all(job.name in step for job in decodes)
        total = sum(rows(step).values())
        assert total <= max(budget, len(decodes) + reserve), "more than the docstring promises"
        prompts = total - len(decodes)
        waiting = sum(job.rows for job in live if job.prefilling)
        assert prompts == min(waiting, max(budget - len(decodes), reserve)), "room is left although prompts wait"

    simulate(Sarathi(budget=budget, reserve=reserve), jobs, watch=watch)
    assert all(job.done for job in jobs)


def test_a_reserve_lengthens_steps_as_its_docstring_says() -> None:
    """Budget 8, reserve 4, six decodes: ten rows, which is the decodes and the reserve together."""
    said = " ".join((Sarathi.__doc__ or "").split())
    assert "more than `budget` rows, or than its decodes and `reserve` together where these are more" in said
    for reserve, want in ((0, 8), (2, 8), (4, 10)):
        jobs = [*(decoding(f"d{i}") for i in range(6)), Job("P", 40)]
        [step] = simulate(Sarathi(budget=8, reserve=reserve), jobs, steps=1)
        assert sum(rows(step).values()) == want == max(8, 6 + reserve)


def test_a_reserve_keeps_prompts_from_starving() -> None:
    def until_prompt_done(reserve: int) -> bool:
        jobs = [*(decoding(f"d{i}") for i in range(8)), Job("P", 12)]
        simulate(Sarathi(budget=8, reserve=reserve), jobs, steps=20)
        return not jobs[-1].prefilling

    assert not until_prompt_done(reserve=0)
    assert until_prompt_done(reserve=2)


def test_the_stall_of_prefill_first_and_its_cure() -> None:
    """A step of n rows lasts a + b n: a stream's gap is bounded by the budget, or by the longest prompt."""
    a, b, budget, long = 1.0, 0.1, 32, 600

    def worst_gap(policy: Sarathi | PrefillFirst) -> tuple[float, float]:
        stream = Job("stream", 4, new=60)
        prompts = [Job("long", long, new=2, arrives=10), Job("short", 20, new=2, arrives=10)]
        simulate(policy, [stream, *prompts], cost=lambda n: a + b * n)
        return max(t - s for s, t in zip(stream.stamps, stream.stamps[1:])), prompts[0].stamps[0]

    stalled, first = worst_gap(PrefillFirst())
    smooth, later = worst_gap(Sarathi(budget=budget))
    assert stalled >= a + b * long
    assert smooth <= a + b * budget + 1e-9
    assert first < later  # what the stall buys


def test_prefill_first_runs_whole_prompts_up_to_its_budget() -> None:
    jobs = [decoding("A"), Job("P1", 10), Job("P2", 7), Job("P3", 20), Job("P4", 2)]
    history = [rows(step) for step in simulate(PrefillFirst(budget=18), jobs, steps=4)]
    assert history == [
        {"P1": 10, "P2": 7},
        {"P3": 20},  # longer than the budget: alone
        {"P4": 2},
        {"A": 1, "P1": 1, "P2": 1, "P3": 1, "P4": 1},
    ]


@pytest.mark.parametrize("knobs", [{"budget": 0}, {"budget": 4, "reserve": 5}, {"reserve": -1}])
def test_bad_knobs_are_named(knobs: dict[str, int]) -> None:
    with pytest.raises(UserError, match="sarathi"):
        Sarathi(**knobs)
    with pytest.raises(UserError, match="prefill_first"):
        PrefillFirst(budget=0)


# ---- in the engine
def test_chunks_of_a_prompt_read_its_kv_again_and_again() -> None:
    """N chunks of c rows: c * N (N + 1) / 2 rows are read where one slice reads N * c."""
    chunk, n = 8, 6
    for budget, expected in ((chunk, chunk * n * (n + 1) // 2), (chunk * n, chunk * n)):
        placed = tiny.engine({"schedule": f"sarathi:budget={budget}"}, prefix_cache=False)
        tiny.run(placed, tiny.prompts(chunk * n), tiny.greedy(1))
        assert placed.counters.kv_bytes_read == expected * placed.store.row_bytes
        assert placed.counters.kv_bytes_written == chunk * n * placed.store.row_bytes


def test_no_step_of_the_engine_exceeds_the_budget() -> None:
    placed = tiny.engine({"schedule": "sarathi:budget=16"}, prefix_cache=False)
    seen: list[int] = []
    given = tiny.prompts(40, 3, 25, 60)
    requests = [tiny.Request(p, tiny.greedy(8)) for p in given]
    for request in requests:
        placed.add(request)
    while not all(r.left for r in requests):
        before = placed.counters.rows
        placed.step()
        seen.append(placed.counters.rows - before)
    assert max(seen) == 16


@pytest.mark.parametrize("budget", [3, 64])
def test_chunked_prompts_give_the_same_tokens(budget: int) -> None:
    given = tiny.prompts(37, 5, 61)
    expected = tiny.outs(tiny.run(tiny.engine({"schedule": "prefill_first"}), given))
    assert tiny.outs(tiny.run(tiny.engine({"schedule": f"sarathi:budget={budget}"}), given)) == expected
