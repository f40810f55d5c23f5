from __future__ import annotations

import itertools
import statistics

import pytest

from phasewise.bench.rounds import agreement, interval, median, order, ratio


def test_every_round_begins_with_another_contender() -> None:
    rounds = [order(["a", "b", "c"], number) for number in range(4)]
    assert rounds == [["a", "b", "c"], ["b", "c", "a"], ["c", "a", "b"], ["a", "b", "c"]]


def test_ratios_are_formed_within_rounds_only() -> None:
    # the machine got ten times slower in round 1: medians of the sides would say 55 / 22, the pairs say 2 and 3
    ours, theirs = {0: 100.0, 1: 10.0, 2: 7.0}, {0: 50.0, 1: 10 / 3, 3: 1.0}
    found = ratio(ours, theirs)
    assert found is not None
    assert (found.median, found.low, found.high, found.n) == pytest.approx((2.5, 2.0, 3.0, 2))
    assert str(found) == "2.50 (2.00 to 3.00)"


def test_nothing_in_common_is_no_ratio() -> None:
    assert ratio({0: 1.0}, {1: 1.0}) is None and ratio({0: 1.0}, {0: 0.0}) is None and median({}) is None
    assert median({0: 3.0, 1: 1.0, 5: 2.0}) == 2.0


def test_agreement_counts_tokens_before_the_first_difference() -> None:
    assert agreement([[1, 2, 3, 4]], [[1, 2, 3, 4]]) == 1.0
    assert agreement([[1, 2, 9, 4], [5, 6]], [[1, 2, 3, 4], [5, 6]]) == pytest.approx(4 / 6)
    assert agreement([[1, 2]], [[1, 2, 3, 4]]) == 0.5
    assert agreement([], []) == 1.0


def test_an_interval_is_that_of_all_resamples() -> None:
    """Of four rounds all 4^4 resamples can be counted; with as many drawn as there are, the quantiles are theirs."""
    each = [0.5, 1.0, 2.0, 4.0]
    medians = sorted(statistics.median(drawn) for drawn in itertools.product(each, repeat=4))
    found = interval(dict(enumerate(each)), dict.fromkeys(range(4), 1.0))
    assert found == (medians[int(0.025 * 256)], medians[int(0.975 * 256)]) == (0.5, 4.0)
    assert interval({0: 2.0, 1: 4.0, 2: 8.0}, {0: 1.0, 1: 2.0, 2: 4.0}) == (2.0, 2.0)
    assert interval({0: 1.0, 1: 2.0, 2: 3.0}, {0: 1.0, 1: 2.0}) is None, "two rounds say nothing of a spread"
