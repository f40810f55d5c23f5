"""Layered prefill: the cohort rule as numbers, and exactness in the engine."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from phasewise.engine.invariants import check
from phasewise.errors import UserError
from phasewise.methods.schedule.layered import Layered
from phasewise.request.params import Params
from phasewise.request.request import Request
from phasewise.step.batch import Batch
from tests import oracle, tiny
from tests.schedule.jobs import Job, Step, decoding, simulate


# ---- numbers
@pytest.mark.parametrize(
    ("prompt", "steps"),
    [(1, 1), (512, 1), (513, 2), (1024, 2), (1025, 4), (2048, 4), (2049, 8), (4096, 8), (4097, 16), (8192, 16)],
)
def test_the_papers_table_of_group_counts(prompt: int, steps: int) -> None:
    job = Job("P", prompt, new=1, layers=16)
    assert len(simulate(Layered(), [job])) == steps


@pytest.mark.parametrize("layers", [3, 4, 10, 12, 36])
@pytest.mark.parametrize("prompt", [600, 1500, 3000, 6000])
def test_a_prompt_takes_as_many_steps_as_groups_of_near_equal_size(layers: int, prompt: int) -> None:
    job = Job("P", prompt, new=1, layers=layers)
    history = [step["P"] for step in simulate(Layered(), [job])]
    chunks = [rows for rows, _ in history]
    if prompt <= 512 * layers:
        wanted = min(1 << (-(-prompt // 512) - 1).bit_length(), layers)
        assert len(history) == wanted and set(chunks) == {prompt}
        sizes = [end - first for first, end in (span or (0, layers) for _, span in history)]
        assert sum(sizes) == layers and max(sizes) - min(sizes) <= 1
    else:
        assert max(chunks) == 512 * layers  # too long for one cohort: chunks first, then groups per chunk


def test_one_cohort_is_in_flight_and_decodes_advance_every_step() -> None:
    jobs = [decoding("A", layers=4), Job("P", 30, layers=4, new=2), Job("Q", 10, layers=4, new=2, arrives=1)]
    history = simulate(Layered(rows_per_group=8), jobs, steps=7)
    assert [step["A"] for step in history] == [(1, None)] * 7
    assert [step.get("P") for step in history[:4]] == [(30, (d, d + 1)) for d in range(4)]
    assert not any("Q" in step for step in history[:4])  # it waits for the cohort ahead
    assert history[4] == {"A": (1, None), "P": (1, None), "Q": (10, (0, 2))}
    assert history[5]["Q"] == (10, (2, 4))


def test_prompts_share_a_cohort_while_they_fit() -> None:
    jobs = [Job(name, n, layers=4, new=1) for name, n in (("P", 10), ("Q", 12), ("R", 11), ("S", 1))]
    history = simulate(Layered(rows_per_group=8), jobs)
    assert list(history[0]) == ["P", "Q"]  # R would exceed 4 x 8 rows, and nobody overtakes it
    assert len({id(step) for step in history if "P" in step}) == 4
    assert list(history[4]) == ["R", "S"]


def test_a_member_that_drops_out_leaves_the_others_on_their_way() -> None:
    policy = Layered(rows_per_group=8)
    jobs = [Job("P", 24, layers=8, new=1), Job("Q", 8, layers=8, new=1)]
    for _ in range(2):
        for work in policy.plan(jobs, 0.0):
            work.job.advance(work.rows, work.layers, 0.0)
    assert [job.depth for job in jobs] == [4, 4]
    rest = [step["Q"][1] for step in simulate(policy, jobs[1:])]
    assert rest == [(4, 8)]  # alone it is one group's worth of rows


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 80), st.integers(1, 5), st.integers(0, 30)), min_size=1, max_size=10),
    st.integers(1, 20),
    st.integers(1, 9),
)
def test_everybody_finishes_and_no_decode_waits(
    shapes: list[tuple[int, int, int]], rows_per_group: int, layers: int
) -> None:
    jobs = [Job(f"j{i}", p, n, layers, a) for i, (p, n, a) in enumerate(shapes)]

    def watch(live: list[Job], step: Step) -> None:
        assert all(job.name in step for job in live if not job.prefilling)
        ranges = {step[job.name][1] for job in live if job.prefilling and job.name in step}
        assert len(ranges) <= 1, "members of a cohort run the same layers"
        prompts = [step[job.name][0] for job in live if job.prefilling and job.name in step]
        assert sum(prompts) <= rows_per_group * layers

    simulate(Layered(rows_per_group=rows_per_group), jobs, watch=watch)
    assert all(job.done for job in jobs)


def test_a_bad_knob_is_named() -> None:
    with pytest.raises(UserError, match="rows_per_group=0"):
        Layered(rows_per_group=0)


# ---- in the engine
def layered(rows_per_group: int, **options: object) -> tiny.Placed:
    return tiny.engine({"schedule": f"layered:rows_per_group={rows_per_group}"}, **options)


@pytest.mark.parametrize(("rows_per_group", "layers"), [(1, 4), (7, 5), (32, 4)])
def test_tokens_equal_whole_prompts(rows_per_group: int, layers: int) -> None:
    of = tiny.model(layers=layers)
    given = tiny.prompts(50, 9, 23, 4)
    params = [Params(max_tokens=9, ignore_eos=True, temperature=t, seed=3) for t in (0.0, 0.9, 0.0, 0.9)]
    expected = tiny.outs(tiny.run(tiny.engine({"schedule": "prefill_first"}, of=of), given, params))
    assert tiny.outs(tiny.run(layered(rows_per_group, of=of), given, params)) == expected
    assert expected[0] == oracle.greedy(tiny.checkpoint(layers=layers), given[0], 9)[0]


def test_kv_equals_that_of_a_whole_prompt() -> None:
    of = tiny.model(layers=5)
    (prompt,) = tiny.prompts(41)

    def rows(schedule: str) -> list[torch.Tensor]:
        placed = tiny.engine({"schedule": schedule}, of=of, prefix_cache=False)
        request = Request(prompt, tiny.greedy(2))
        placed.add(request)
        while not request.n_out:
            placed.step()
        return [plane.clone() for piece in request.kv.dump() for plane in piece["planes"]]

    whole = rows("prefill_first")
    for rows_per_group in (5, 11, 21):
        grouped = rows(f"layered:rows_per_group={rows_per_group}")
        assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-5) for a, b in zip(whole, grouped))


def test_a_prompt_finishes_after_exactly_as_many_steps_and_streams_never_pause() -> None:
    placed = layered(12)
    stream, late = (Request(p, tiny.greedy(20)) for p in tiny.prompts(3, 40))
    placed.add(stream)
    placed.step()
    assert stream.n_out == 1
    placed.add(late)
    for step in range(1, 5):  # 40 rows by 12 a group: 4 groups of one layer each
        rows = placed.counters.rows
        placed.step()
        check(placed)
        assert stream.n_out == 1 + step
        assert late.depth == (step if step < 4 else 0)
        assert placed.counters.rows - rows == (41 if step == 1 else 1)  # rows enter the first layer once
    assert late.n_out == 1
    tiny.finish(placed, [stream, late])
    assert late.out == oracle.greedy(placed.model.files.path, late.prompt, 20)[0]


def test_prefix_hits_apply_at_all_layers() -> None:
    head, *tails = tiny.prompts(70, 20, 33)
    given = [head + tail for tail in tails]
    placed = layered(8)
    first = tiny.outs(tiny.run(placed, given[:1]))
    placed = layered(8)
    requests = []
    for prompt in (given[0], given[1], given[0]):
        request = Request(prompt, tiny.greedy())
        placed.add(request)
        while request.left is None:
            placed.step()
            check(placed)
        requests.append(request)
    assert placed.counters.prefix_hits > 0
    assert requests[0].out == requests[2].out == first[0]
    assert requests[1].out == oracle.greedy(placed.model.files.path, given[1], 16)[0]


@pytest.mark.parametrize("after", range(1, 5))
def test_a_member_cancelled_on_its_way_takes_nobody_along(after: int) -> None:
    placed = layered(8)
    doomed, other, stream = (Request(p, tiny.greedy(8)) for p in tiny.prompts(13, 15, 2))
    placed.add(stream)
    placed.step()
    placed.add(doomed)
    placed.add(other)
    for _ in range(after):
        placed.step()
    assert doomed.depth == after % 4
    placed.cancel(doomed)
    check(placed)
    tiny.finish(placed, [doomed, other, stream])
    assert doomed.left.how == "cancelled"
    for request in (other, stream):
        assert request.out == oracle.greedy(placed.model.files.path, request.prompt, 8)[0]


def test_siblings_fork_where_the_cohort_arrives() -> None:
    (prompt,) = tiny.prompts(40)
    params = Params(max_tokens=8, temperature=1.0, seed=5, ignore_eos=True)

    def family(placed: tiny.Placed) -> list[Request]:
        parent = Request(prompt, params)
        requests = [parent, *(parent.sibling(i) for i in (1, 2))]
        for request in requests:
            placed.add(request)
        tiny.finish(placed, requests)
        return requests

    placed = layered(10)
    assert tiny.outs(family(placed)) == tiny.outs(family(tiny.engine()))
    assert placed.counters.row_layers == (40 + 3 * 7) * placed.model.config.layers  # the prompt was computed once


def test_a_slice_preempted_on_its_way_starts_again() -> None:
    """While the second prompt crosses the layers, the first request outgrows its slab and needs the other's room."""
    row = tiny.engine().store.row_bytes
    placed = layered(5, kv_bytes=3 * 64 * row, prefix_cache=False)  # 3 slabs of 64 rows
    requests = [Request(p, tiny.greedy(10)) for p in tiny.prompts(61, 70)]
    for request in requests:
        placed.add(request)
    depth = 0
    while placed.counters.preemptions == 0:
        depth = requests[1].depth
        placed.step()
        check(placed)
    assert 0 < depth < 4 and requests[1].depth == 0
    tiny.finish(placed, requests)
    assert tiny.outs(requests) == [oracle.greedy(placed.model.files.path, r.prompt, 10)[0] for r in requests]


def test_taps_of_layers_behind_a_slice_come_along() -> None:
    """A method that looks into layers sees for a layered prompt what it sees for a whole one."""

    def seen(schedule: str) -> dict[int, torch.Tensor]:
        placed = tiny.engine({"schedule": schedule})
        placed.parts.taps.update({0, 1, 3})
        for phase in placed.parts.phases:
            object.__setattr__(phase, "taps", frozenset({0, 1, 3}))
        decode = placed.parts.phases[0].decode
        caught: dict[int, torch.Tensor] = {}
        accept = decode.accept

        def spy(spans: list, hidden: object) -> list:
            for span in spans:
                if span.rows == 30:
                    caught.update({i: x[span.slice].clone() for i, x in hidden.taps.items()})
            return accept(spans, hidden)

        decode.accept = spy
        tiny.run(placed, tiny.prompts(5, 30), tiny.greedy(4))
        return caught

    whole, grouped = seen("prefill_first"), seen("layered:rows_per_group=9")
    assert list(whole) == list(grouped) == [0, 1, 3]
    assert all(torch.allclose(whole[i], grouped[i], atol=1e-5) for i in whole)


def test_what_a_slice_takes_along_is_no_part_of_memory_that_the_next_step_writes() -> None:
    spans: list[Any] = [
        SimpleNamespace(tokens=[5] * rows, positions=range(rows), rows=rows, layers=(0, 2), taps={}, slice=part)
        for rows, part in ((3, slice(0, 3)), (2, slice(3, 5)))
    ]
    x = torch.randn(5, 8)
    want = x.clone()
    Batch(spans).carry(x, {})
    x.fill_(math.nan)
    assert all(torch.equal(span.hidden, want[span.slice]) for span in spans)
