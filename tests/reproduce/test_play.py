"""Loads as they are played, and what of a run counts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from phasewise.errors import UserError
from phasewise.reproduce.play import LoadEntry, PlayedRun, PlayedStep, play
from phasewise.request.counters import Counters
from tests import tiny


def test_later_requests_come_after_so_many_tokens_of_the_first() -> None:
    first, second, third = tiny.prompts(9, 30, 20)
    engine = tiny.engine(prefix_cache=False)
    run = play(engine, [LoadEntry(first, 10), LoadEntry(second, 3, after=4), LoadEntry(third, 2, after=7)])
    assert [len(out) for out in run.outs] == [10, 3, 2]
    assert [step.rows for step in run.steps] == [9, 1, 1, 1, 31, 2, 2, 21, 2, 1]
    assert [step.wanted for step in run.steps] == [step.rows for step in run.steps]
    assert [step.streams for step in run.steps] == [0, 1, 1, 1, 1, 2, 2, 1, 2, 1]
    assert sum(step.streams - step.advanced for step in run.steps) == 0
    assert run.work.rows == sum(step.rows for step in run.steps)
    assert run.work.kv_bytes_read == sum(step.read for step in run.steps)
    assert [r.prompt_len for r in run.early] == [9] and [r.prompt_len for r in run.late] == [30, 20]
    assert run.stall() == 31


def test_what_a_stream_waits_for() -> None:
    lines = [(9, 9, 0, 0), (2, 2, 2, 2), (50, 52, 2, 0), (30, 32, 2, 0), (2, 2, 2, 2), (7, 7, 2, 2), (90, 90, 0, 0)]
    steps = [PlayedStep(*line, 0, 0) for line in lines]
    run = PlayedRun([], [], Counters(), 1.0, 0, steps)
    assert run.stall() == 50 + 30 + 2


def test_bytes_held_are_those_of_committed_rows() -> None:
    engine = tiny.engine(prefix_cache=False)
    run = play(engine, [LoadEntry(tiny.prompts(20)[0], 5)])
    row = engine.store.row_bytes  # type: ignore[attr-defined]
    assert [step.kv for step in run.steps] == [20 * row, 21 * row, 22 * row, 23 * row, 0]
    assert [len(step_reads) for step_reads in [run.decoding]] == [4]


def test_shared_beginnings_are_asked_before_and_do_not_count() -> None:
    shared = tiny.prompts(64)[0]
    entries = [LoadEntry(shared + end, 2, shared=64) for end in tiny.prompts(5, 6, seed=1)]
    engine = tiny.engine()
    run = play(engine, entries)
    assert run.work.prefix_hits == 128 and run.work.rows == 5 + 6 + 2


def test_a_failure_is_said() -> None:
    engine = tiny.engine(prefix_cache=False)
    with pytest.raises(UserError, match="context"):
        play(engine, [LoadEntry(tiny.prompts(2000)[0], 4)])
    short = replace(LoadEntry(tiny.prompts(5)[0], 10))
    with pytest.raises(UserError, match="did not finish"):
        play(engine, [short], most=3)


def test_a_temperature_draws_by_a_seed_per_request() -> None:
    (prompt,) = tiny.prompts(9)
    entries = [LoadEntry(prompt, 12, temperature=1.0)] * 3
    runs = [play(tiny.engine(prefix_cache=False), entries).outs for _ in range(2)]
    assert runs[0] == runs[1], "the same again"
    assert len(set(map(tuple, runs[0]))) == 3, "and each its own"
