"""Splitwise's machines: prompts whole and first, decodes preempted at most so often, the oldest sufferers first."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phasewise.errors import UserError
from phasewise.methods.schedule.splitwise import SplitwiseMachine
from tests.schedule.jobs import Job, bound, decoding, rows, simulate


def test_a_scripted_step() -> None:
    """Budget 10: six rows of prompts leave four for five decodes, then five prompts in turn leave none."""
    decodes = [decoding(name) for name in "ABCDE"]
    jobs = [*decodes, Job("P", 6, 99)]
    history = [rows(step) for step in simulate(SplitwiseMachine(budget=10), jobs, steps=1)]
    assert history == [{"P": 6, "A": 1, "B": 1, "C": 1, "D": 1}]
    plan = bound(SplitwiseMachine(budget=10, preemptions=2)).plan
    long = [Job(name, 10, 99) for name in "PQRS"]
    seen = []
    for prompt in long:
        works = plan([*decodes, prompt], 0.0)
        seen.append([work.job.name for work in works])
    assert seen == [["P"], ["Q"], [*"ABCDE", "R"], [*"ABCDE", "S"]], "preempted twice, they always run"


def test_who_was_preempted_more_often_goes_first() -> None:
    plan = bound(SplitwiseMachine(budget=10)).plan
    a, b = decoding("A"), decoding("B")
    assert [work.job.name for work in plan([b, Job("P", 10)], 0.0)] == ["P"]
    assert [work.job.name for work in plan([a, b, Job("Q", 9)], 0.0)] == ["Q", "B"]


def test_prompts_are_batched_whole_and_in_order() -> None:
    plan = bound(SplitwiseMachine(budget=10)).plan
    jobs = [Job("P", 4), Job("Q", 7), Job("R", 2)]
    assert [(work.job.name, work.rows) for work in plan(jobs, 0.0)] == [("P", 4)], "nobody overtakes"
    assert [(work.job.name, work.rows) for work in plan([Job("L", 99), *jobs], 0.0)] == [("L", 99)]


shapes_of = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 8), st.integers(0, 30)), min_size=1, max_size=12)


@settings(max_examples=60, deadline=None)
@given(shapes_of, st.integers(1, 40), st.integers(0, 4))
def test_nobody_is_preempted_more_often_than_allowed(shapes: Any, budget: int, most: int) -> None:
    jobs = [Job(f"j{i}", prompt, new, arrives=at) for i, (prompt, new, at) in enumerate(shapes)]
    preempted: Counter[str] = Counter()

    def watch(live: list[Job], step: dict) -> None:
        got, prompts = rows(step), [job for job in live if job.prefilling]
        out = [job.name for job in live if not job.prefilling and job.name not in got]
        assert not out or prompts, "nobody waits where there is no prompt"
        assert all(got.get(job.name, job.rows) == job.rows for job in prompts), "prompts are whole"
        ran = [job.name in got for job in prompts]
        assert not prompts or (ran[0] and ran == sorted(ran, reverse=True)), "prompts run in order, the oldest always"
        if prompts:
            must = sum(preempted[job.name] >= most for job in live if not job.prefilling) + prompts[0].rows
            assert sum(got.values()) <= max(budget, must)
        preempted.update(out)

    simulate(SplitwiseMachine(budget=budget, preemptions=most), jobs, watch=watch)
    assert all(job.done for job in jobs)
    assert max(preempted.values(), default=0) <= most


def test_mistakes_are_named() -> None:
    for knobs in ({"budget": 0}, {"preemptions": -1}):
        with pytest.raises(UserError, match="must be at least"):
            SplitwiseMachine(**knobs)
