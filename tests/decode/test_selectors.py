"""Which masked rows become final: the rules on hand-made confidences, and the promise of progress on any."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasewise.methods.decode._selectors import SELECTORS, Masked, dynamic, entropy, quota, sequential, static

CONFIDENT = Masked([0.2, 0.95, 0.5, 0.95, 0.91], [1.5, 0.2, 0.9, 0.2, 0.3], 2)


def test_sequential_takes_the_next_from_the_left() -> None:
    assert sequential(CONFIDENT, 0.0) == [0, 1]


def test_static_takes_the_most_confident_and_of_equals_the_first() -> None:
    assert static(CONFIDENT, 0.0) == [1, 3]
    assert static(Masked([0.5, 0.5, 0.5], [], 1), 0.0) == [0]


def test_dynamic_takes_all_the_sure_ones_or_falls_back() -> None:
    assert dynamic(CONFIDENT, 0.9) == [1, 3, 4]
    assert dynamic(CONFIDENT, 0.99) == [1, 3]
    assert dynamic(CONFIDENT, 1.1) == static(CONFIDENT, 0.0)
    assert dynamic(CONFIDENT, 0.0) == [0, 1, 2, 3, 4]


def test_entropy_fills_its_budget_from_the_surest_up() -> None:
    assert entropy(CONFIDENT, 0.6) == [1, 3]  # 0.2 + 0.2 < 0.6, a third would make 0.7
    assert entropy(CONFIDENT, 0.75) == [1, 3, 4]
    assert entropy(CONFIDENT, 0.0) == [1]
    assert sorted(entropy(CONFIDENT, 100.0)) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(("block", "steps"), [(4, 4), (4, 3), (8, 3), (5, 1), (32, 7)])
def test_quotas_sum_to_the_block_with_the_remainder_first(block: int, steps: int) -> None:
    quotas = [quota(block, steps, s) for s in range(steps)]
    assert sum(quotas) == block
    assert quotas == sorted(quotas, reverse=True) and quotas[0] - quotas[-1] <= 1


@given(st.lists(st.floats(0, 1), min_size=1, max_size=9), st.integers(1, 9), st.floats(0, 2), st.data())
def test_every_selector_makes_progress(
    confidence: list[float], share: int, threshold: float, data: st.DataObject
) -> None:
    entropies = data.draw(st.lists(st.floats(0, 8), min_size=len(confidence), max_size=len(confidence)))
    for select in SELECTORS.values():
        chosen = select(Masked(confidence, entropies, share), threshold)
        assert chosen and len(set(chosen)) == len(chosen) and set(chosen) <= set(range(len(confidence)))
