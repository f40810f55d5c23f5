"""Dynamic SplitFuse: steps of exactly the budget's rows, and where they differ from sarathi's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phasewise.errors import UserError
from phasewise.methods.schedule.prefill_first import PrefillFirst
from phasewise.methods.schedule.sarathi import Sarathi
from phasewise.methods.schedule.splitfuse import SplitFuse
from phasewise.request.params import Params
from phasewise.request.request import Request
from tests import oracle, tiny
from tests.schedule.jobs import Job, decoding, rows, simulate


def test_the_papers_worked_trace() -> None:
    """Budget 16; three decodes; prompts of 10, 7 and 20."""
    jobs = [decoding(name) for name in "ABC"] + [Job("P1", 10, 99), Job("P2", 7, 99), Job("P3", 20, 99)]
    history = [rows(step) for step in simulate(SplitFuse(budget=16), jobs, steps=5)]
    abc = {"A": 1, "B": 1, "C": 1}
    assert history == [
        abc | {"P1": 10, "P2": 3},
        abc | {"P1": 1, "P2": 4, "P3": 8},
        abc | {"P1": 1, "P2": 1, "P3": 11},
        abc | {"P1": 1, "P2": 1, "P3": 1},  # the last row of P3's prompt; 10 rows are free
        abc | {"P1": 1, "P2": 1, "P3": 1},
    ]
    assert [sum(step.values()) for step in history] == [16, 16, 16, 6, 6]
    assert jobs[5].out == 2  # at the end of its prompt, and one decode


shapes_of = st.lists(
    st.tuples(st.integers(1, 60), st.integers(1, 8), st.integers(0, 30), st.integers(0, 5)), min_size=1, max_size=12
)


@settings(max_examples=60, deadline=None)
@given(shapes_of, st.integers(1, 40), st.integers(0, 25))
def test_every_step_is_filled_exactly(shapes: list[tuple[int, int, int, int]], budget: int, preempt: int) -> None:
    jobs = [Job(f"j{i}", p, n, arrives=a, guesses=g) for i, (p, n, a, g) in enumerate(shapes)]
    steps = 0

    def watch(live: list[Job], step: dict) -> None:
        nonlocal steps
        steps += 1
        got = rows(step)
        assert sum(got.values()) == min(budget, sum(job.rows for job in live))
        decodes = [job for job in live if not job.prefilling]
        assert sum(job.name in got for job in decodes) == min(len(decodes), budget), "a decode waits for a prompt"
        if any(job.prefilling and got.get(job.name, 0) < job.rows for job in live):
            assert all(got.get(job.name, 0) <= max(1, job.known - job.computed) for job in decodes), (
                "guesses run although a prompt wants their rows"
            )

    for _ in range(2):  # the second time, with everybody's KV lost on the way
        simulate(SplitFuse(budget=budget), jobs, steps=preempt, watch=watch)
        for job in jobs:
            job.computed = 0
    simulate(SplitFuse(budget=budget), jobs, watch=watch)
    assert all(job.done for job in jobs)


def test_plain_mixes_come_out_as_with_sarathi() -> None:
    def run(policy: SplitFuse | Sarathi) -> list[dict[str, int]]:
        shapes = [(40, 5, 0), (3, 9, 0), (70, 2, 3), (1, 6, 4), (25, 5, 4)]
        jobs = [Job(f"j{i}", p, n, arrives=a) for i, (p, n, a) in enumerate(shapes)]
        return [rows(step) for step in simulate(policy, jobs)]

    assert run(SplitFuse(budget=16)) == run(Sarathi(budget=16))


def test_of_too_many_decodes_those_run_that_waited_longest() -> None:
    """Ten streams share four rows a step: each gets a token at least every third step."""
    jobs = [decoding(f"d{i}") for i in range(10)]
    history = simulate(SplitFuse(budget=4), jobs, steps=50)
    assert {sum(rows(step).values()) for step in history} == {4}
    assert max(b - a for job in jobs for a, b in zip([0.0, *job.stamps], job.stamps)) == 3
    assert {sum(rows(step).values()) for step in simulate(Sarathi(budget=4), jobs, steps=5)} == {10}


def test_guesses_take_what_prompts_leave() -> None:
    def first_steps(policy: SplitFuse | Sarathi) -> list[dict[str, int]]:
        jobs = [decoding("A"), Job("P", 20, new=1)]
        jobs[0].guesses = 6
        return [rows(step) for step in simulate(policy, jobs, steps=4)]

    assert first_steps(SplitFuse(budget=8)) == [{"A": 1, "P": 7}, {"A": 1, "P": 7}, {"A": 2, "P": 6}, {"A": 7}]
    assert first_steps(Sarathi(budget=8)) == [{"A": 7, "P": 1}] * 4


def test_what_is_recomputed_waits_in_line_with_the_prompts() -> None:
    lost, early, late = Job("lost", 4, new=30, out=12, computed=4), Job("early", 9), Job("late", 9)
    (step,) = simulate(SplitFuse(budget=16), [early, lost, late], steps=1)
    assert rows(step) == {"lost": 7, "early": 9}


def seconds(sizes: Sequence[int]) -> float:
    """A step reads the weights, computes, and pays for what no longer fits in: per row, 64 rows cost least."""
    return sum(1 + n / 32 + (n / 64) ** 2 for n in sizes)


def sizes(schedule: Any, prompts: Sequence[int]) -> list[int]:
    """Rows of each step until all prompts are done."""
    jobs = [Job(str(i), prompt, new=1) for i, prompt in enumerate(prompts)]
    return [sum(rows(step).values()) for step in simulate(schedule, jobs)]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 300), min_size=1, max_size=30))
def test_no_split_of_the_same_rows_is_faster_than_steps_of_the_best_size(split: list[int]) -> None:
    mine = sizes(SplitFuse(budget=64), [sum(split) // 2 + 1, sum(split) - sum(split) // 2])
    assert sum(mine) == sum(split) + 1
    assert set(mine[:-1]) <= {64}
    assert seconds(mine) < seconds([*split, 1]) + 1.0  # but for the last step, which nothing fills


@pytest.mark.parametrize(
    "other", [SplitFuse(budget=16), SplitFuse(budget=256), PrefillFirst(budget=1 << 20)], ids=["16", "256", "whole"]
)
def test_steps_of_another_size_are_slower(other: Any) -> None:
    """What the test above would catch."""
    prompts = [700, 30, 450, 800]
    assert seconds(sizes(other, prompts)) > 1.2 * seconds(sizes(SplitFuse(budget=64), prompts))


def test_a_bad_knob_is_named() -> None:
    with pytest.raises(UserError, match="splitfuse: budget=0"):
        SplitFuse(budget=0)


# ---- in the engine
@pytest.mark.parametrize(
    ("budget", "draft"), [(1, None), (3, "draft_model:model=tiny-draft,k=3"), (16, "prompt_lookup:k=4")]
)
def test_steps_of_the_engine_are_full_and_tokens_are_the_same(budget: int, draft: str | None) -> None:
    verbs = {"draft": draft} if draft else {}
    drawn = draft is not None and draft.startswith("draft_model")  # unless greedy; then guesses come whole
    placed = tiny.engine(verbs | {"schedule": f"splitfuse:budget={budget}"}, prefix_cache=False)
    params = [Params(max_tokens=8, ignore_eos=True, temperature=t, seed=4) for t in (0.0, 0.8, 0.0, 0.8)]
    requests = [Request(p, q) for p, q in zip(tiny.prompts(40, 3, 25, 61), params)]
    for request in requests:
        placed.add(request)
    while not all(request.left for request in requests):
        before, waiting = placed.counters.rows, sum(r.prompt_len - r.computed for r in requests if r.prefilling)
        units = sum(
            3 for r in requests if drawn and not (r.prefilling or r.left or r.params.greedy)
        )  # on top of the row granted
        placed.step()
        assert min(budget, waiting) <= placed.counters.rows - before <= budget + units
    assert requests[0].out == oracle.greedy(tiny.checkpoint(), requests[0].prompt, 8)[0]
    for request, own in zip(requests, params):
        (alone,) = tiny.run(tiny.engine(verbs | {"schedule": "prefill_first"}), [request.prompt], own)
        assert request.out == alone.out


def test_guesses_of_an_idle_engine_are_not_held_back() -> None:
    """A lone stream's draft is verified in as few steps as without a budget."""
    (prompt,) = tiny.prompts(6)
    counts = []
    for schedule in ("splitfuse:budget=8", "sarathi"):
        placed = tiny.engine({"draft": "draft_model:model=tiny,k=3", "schedule": schedule}, prefix_cache=False)
        tiny.run(placed, [prompt], tiny.greedy(21))
        counts.append((placed.counters.steps, placed.counters.accepted))
    assert counts[0] == counts[1] and counts[0][1] >= 15
