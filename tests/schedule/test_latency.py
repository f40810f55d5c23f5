"""How long a step takes, as a scheduler learns it from a clock."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phasewise.methods.schedule._latency import Latency


def test_a_line_is_learned_and_relearned() -> None:
    latency = Latency()
    assert latency(1000) == 0.0 and latency.rows_in(1.0) == math.inf
    draw = random.Random(1)
    for a, b in ((0.02, 0.0005), (0.01, 0.002)):  # the machine becomes slower in the middle
        for _ in range(200):
            n = draw.randint(1, 500)
            latency.observe(n, (a + b * n) * draw.uniform(0.95, 1.05))
        assert latency.line() == (pytest.approx(a, rel=0.5), pytest.approx(b, rel=0.05))
        assert latency(300) == pytest.approx(a + b * 300, rel=0.05)
        assert latency(300, steps=4) == pytest.approx(latency(300) + 3 * latency(0))
        assert latency.rows_in(latency(123)) == pytest.approx(123)


def test_steps_of_one_size_count_by_the_row() -> None:
    latency = Latency()
    for _ in range(500):
        latency.observe(64, 0.5)
    assert latency(64) == pytest.approx(0.5) and latency.rows_in(0.25) == pytest.approx(32)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 4096), st.floats(0, 100)), min_size=1, max_size=60))
def test_nothing_it_sees_makes_a_prediction_negative(seen: list[tuple[int, float]]) -> None:
    latency = Latency()
    for n, seconds in seen:
        latency.observe(n, seconds)
    a, b = latency.line()
    assert a >= -1e-9 and b >= 0.0 and not math.isnan(latency.rows_in(0.5))
