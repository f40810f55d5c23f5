"""Intervals of paired differences."""

from __future__ import annotations

from random import Random

import pytest

from phasewise.bench import stats


def test_shares_that_always_agree_have_a_width_that_shrinks() -> None:
    few, many = (stats.shares([1.0] * n, [1.0] * n) for n in (10, 1000))
    assert few.mean == many.mean == 0.0
    assert few.low < many.low < 0 < many.high < few.high


def test_shares_of_a_clear_difference() -> None:
    found = stats.shares([1.0] * 60, [0.0] * 40 + [1.0] * 20)
    assert found.mean == pytest.approx(2 / 3) and 0.5 < found.low < found.mean < found.high < 0.8


def test_pairing_is_what_counts() -> None:
    """The same shares, once with the same examples right, once with others."""
    a = [1.0] * 50 + [0.0] * 50
    assert stats.shares(a, a).high < stats.shares(a, a[::-1]).high


def test_the_intervals_cover_about_as_often_as_they_say() -> None:
    rng, hits = Random(0), 0
    for _ in range(400):
        a = [float(rng.random() < 0.9) for _ in range(60)]
        b = [float(x if rng.random() < 0.8 else rng.random() < 0.5) for x in a]
        hits += (found := stats.shares(a, b)).low <= 0.2 * (0.9 - 0.5) <= found.high
    assert 0.92 <= hits / 400 <= 0.99


def test_means() -> None:
    found = stats.means([1.0, 2.0, 3.0], [0.0, 1.0, 2.0])
    assert (found.mean, found.low, found.high) == (1.0, 1.0, 1.0)
    assert stats.means([1.0], [0.5]).low == float("-inf")


def test_words() -> None:
    assert stats.shares([1.0] * 4, [0.0] * 4).text(percent=True).startswith("+100.0 points (")
    assert stats.means([0.5, 0.5], [1.0, 1.0]).text(percent=False) == "-0.500 nats (-0.500 to -0.500)"
