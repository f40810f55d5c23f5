"""The laws scale: rows in which any two methods meet are few, and one more method costs seconds at most."""

from __future__ import annotations

from itertools import combinations, product

import pytest

from tests import seeds
from tests.laws import axes, growth
from tests.laws.covering import covering
from tests.laws.settings import discovered

SIZES = [
    (3, 3, 3, 3),
    (2,) * 10,
    (5, 4, 9, 3, 3, 3, 2),
    (20, 20, 20, 20),
    (8, 6, 34, 18, 14, 10, 10),
    (7, 1),
    (1, 1, 1),
]


def factors(sizes: tuple[int, ...]) -> list[list[tuple[int, int]]]:
    return [[(f, value) for value in range(size)] for f, size in enumerate(sizes)]


def pairs(values: list[list[tuple[int, int]]]) -> set[frozenset[tuple[int, int]]]:
    return {frozenset(pair) for f, g in combinations(values, 2) for pair in product(f, g)}


def met(rows: list[tuple[tuple[int, int], ...]]) -> set[frozenset[tuple[int, int]]]:
    return {frozenset(pair) for row in rows for pair in combinations(row, 2)}


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_every_pair_is_covered_by_hardly_more_rows_than_there_must_be(sizes: tuple[int, ...]) -> None:
    rows = covering(factors(sizes))
    assert met(rows) == pairs(factors(sizes))
    first, second = sorted(sizes)[-2:]
    assert first * second <= len(rows) <= 1.25 * first * second + 5
    assert rows == covering(factors(sizes)), "the same every time"


def test_a_row_less_covers_less() -> None:
    """No row is there for nothing, at least not the last ones."""
    rows = covering(factors((5, 4, 9, 3, 3, 3, 2)))
    assert met(rows[:-1]) < met(rows)


def test_what_is_excluded_is_in_no_row_and_all_else_is() -> None:
    values = factors((4, 5, 3))
    banned = {frozenset({(0, 1), (1, 2)}), frozenset({(0, 3), (2, 1)}), frozenset({(1, 4), (2, 2)})}
    rows = covering(values, lambda a, b: frozenset((a, b)) not in banned)
    assert met(rows) == pairs(values) - banned
    with pytest.raises(ValueError, match="the first of a factor goes with all"):
        covering(values, lambda a, b: {a, b} != {(0, 0), (1, 2)})


def test_one_more_method_among_120_costs_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """At most 2 core-seconds of the quick tier, whatever its verb: two that hold or are held the most, two others."""
    growth.grow(monkeypatch, 120 - len(discovered()))
    quick = growth.seconds(growth.quick())
    others = [verb for verb in growth.SHARES if verb not in ("draft", "decode")]  # which hold, or are held, the most
    for verb in ("draft", "decode", *seeds.some(others, 2, "growth")):
        with monkeypatch.context() as patch:
            growth.grow(patch, 0, [verb])
            assert len(discovered()) == 121
            assert 0 < growth.seconds(growth.quick()) - quick < 2.0, verb


def test_at_120_methods_the_thorough_samples_are_no_larger(monkeypatch: pytest.MonkeyPatch) -> None:
    """And one more method costs at most 10 core-seconds of the thorough tier."""
    growth.grow(monkeypatch, 120 - len(discovered()))
    found = growth.rest()
    assert found["scenario"] <= 72 and found["neutral"] <= 48 and found["composition"] <= 120
    assert any("attend.made" in choice.name for row in axes.compositions(full=False) for choice in row)
    growth.grow(monkeypatch, 0, ["draft"])  # which most others hold, and most others meet
    assert abs(growth.seconds(growth.rest()) - growth.seconds(found)) < 10.0
