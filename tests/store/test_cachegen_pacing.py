"""The controller: closed forms, every plan of small cases tried, and averages that forget."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phasewise.methods.store._cachegen.pacing import Average, LinkPacer, choose

NEVER = [float("inf")] * 9


def total(plan: list[int | None], sizes: list[list[int]], again: list[int], bandwidth: int) -> float:
    return sum(again[i] if level is None else sizes[i][level] / bandwidth for i, level in enumerate(plan))


# ---- closed forms
def test_equal_chunks_go_at_the_best_level_that_fits() -> None:
    """Ten chunks of 8, 4 and 2 bytes at one byte a second take 80, 40 and 20 seconds."""
    sizes = [[8, 4, 2]] * 10
    assert choose(sizes, NEVER[:1] * 10, 1, 80) == [0] * 10
    assert choose(sizes, NEVER[:1] * 10, 1, 79) == [1] + [0] * 9, "which saves enough for the others"
    assert choose(sizes, NEVER[:1] * 10, 2, 20) == [1] * 10
    assert choose(sizes, NEVER[:1] * 10, 1, 20) == [2] * 10
    assert choose(sizes, NEVER[:1] * 10, 1, 19) == [2] * 10, "late, but there is nothing better"


def test_what_is_saved_early_is_spent_late() -> None:
    """All large would take 50 s; the first one's small form saves 18 of them."""
    sizes = [[20, 2], [10, 2], [10, 2], [10, 2]]
    assert choose(sizes, NEVER[:4], 1, 32) == [1, 0, 0, 0]
    assert choose(sizes, NEVER[:4], 1, 31) == [1, 1, 0, 0]
    assert choose(sizes, NEVER[:4], 1, 50) == [0, 0, 0, 0]


def test_computing_again_is_for_links_that_are_too_slow() -> None:
    """8 chunks of at least 3 bytes; 16 seconds to compute them all."""
    sizes, again = [[9, 3]] * 8, [2.0] * 8
    assert choose(sizes, again, 1, 24) == [1] * 8
    assert choose(sizes, again, 1, 23) == [None] * 8
    assert choose(sizes, [3.5] * 8, 1, 23) == [1] * 8, "slower still"
    assert choose(sizes, [3.0] * 8, 1, 23) == [1] * 8, "no sooner: then rather send"


def test_a_suffix_is_left_out_where_that_is_shortest() -> None:
    sizes, again = [[6, 3], [6, 3], [9, 6], [9, 6]], [5.0, 5.0, 2.0, 1.0]
    assert choose(sizes, again, 1, 9) == [1, 1, None, None]
    assert choose(sizes, again, 1, 12) == [1, 0, None, None], "3 + 6 + 2 + 1"
    assert choose(sizes, again, 1, 17) == [0, 0, None, None], "12 + 3"
    assert choose(sizes, again, 1, 18) == [1, 1, 1, 1]


def test_nothing_to_send() -> None:
    assert choose([], [], 1, 1) == []
    assert LinkPacer([2, 1]).plan([], [], 1, True) == []


# ---- against all plans
CHUNKS = st.lists(
    st.tuples(st.lists(st.integers(1, 40), min_size=3, max_size=3).map(lambda x: sorted(x)[::-1]), st.integers(1, 40)),
    min_size=1, max_size=4,
)  # fmt: skip


@settings(max_examples=80, deadline=None)
@given(CHUNKS, st.sampled_from([1, 2, 4]), st.integers(1, 120))
def test_all_plans_tried(chunks: list[tuple[list[int], int]], bandwidth: int, seconds: int) -> None:
    """In time whenever any plan is, by levels alone whenever these are enough, and the first chunk as good as it may be
    if the others are not to be worse."""
    sizes, again = [c[0] for c in chunks], [c[1] for c in chunks]
    n = len(sizes)
    plan = choose(sizes, again, bandwidth, seconds)
    cut = next((i for i, level in enumerate(plan) if level is None), n)
    assert plan[cut:] == [None] * (n - cut)
    every = [[*levels, *[None] * (n - c)] for c in range(n + 1) for levels in product(range(3), repeat=c)]
    took = {tuple(p): total(p, sizes, again, bandwidth) for p in every}
    mine = took[tuple(plan)]
    if min(took.values()) <= seconds:
        assert mine <= seconds
    else:
        assert mine == min(took.values())
    whole = [p for p in took if None not in p and took[p] <= seconds]
    assert (None in plan) <= (not whole)
    uniform = [level for level in range(3) if (level,) * n in whole]
    if uniform:
        assert plan[0] == uniform[0]
        assert all(level is not None and level <= uniform[0] for level in plan), "nothing worse than one level for all"


# ---- what is measured
def test_averages_forget() -> None:
    mean = Average(weight=0.5)
    assert mean.value is None
    for sample, value in ((8.0, 8.0), (4.0, 6.0), (4.0, 5.0)):
        mean.add(sample)
        assert mean.value == value


def test_the_middle_until_something_is_known() -> None:
    pace = LinkPacer([4, 2, 1, 0.5, 0.25])
    assert pace.plan([16, 16, 3], [100, 100, 20], 1.0, True) == [2, 2, 2]
    pace.delivered(0, 1.0)
    pace.delivered(1000, 0.0)
    assert pace.bandwidth is None, "neither says anything"


def test_a_pace_learns() -> None:
    pace = LinkPacer([4, 1])
    pace.delivered(1000, 2.0)
    assert pace.bandwidth == 500
    pace.delivered(1500, 1.0)
    assert pace.bandwidth == pytest.approx(800)
    assert pace.plan([10] * 2, [1000] * 2, 10.0, True) == [0, 0], "8,000 bytes in 10 seconds"
    assert pace.plan([10] * 2, [1000] * 2, 9.9, True) == [1, 0]
    pace.encoded(1, 1000, 500)
    assert pace.size(1) == 0.5 and pace.size(0) == 4
    assert pace.plan([10] * 2, [1000] * 2, 0.7, True) == [1, 1], "nothing is known of computing"
    pace.computed(100, 1.0)
    assert pace.plan([10] * 2, [1000] * 2, 0.7, True) == [None, None], "0.2 s instead of 1.25"
    assert pace.plan([10] * 2, [1000] * 2, 0.7, False) == [1, 1]


def test_a_bandwidth_that_is_given_is_believed() -> None:
    pace = LinkPacer([4, 1], bandwidth=100.0)
    pace.delivered(10**9, 1.0)
    assert pace.bandwidth == 100.0
