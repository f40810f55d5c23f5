"""Which masked rows become final: the rules on hand-made confidences, and the promise of progress on any."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phasewise import catalog
from phasewise.errors import UserError
from phasewise.methods.decode._selectors import Masked, quota
from tests import tiny

CONFIDENT = Masked([0.2, 0.95, 0.5, 0.95, 0.91], [1.5, 0.2, 0.9, 0.2, 0.3], 2, [0, 1, 2, 3, 4])


def chosen(selector: str, masked: Masked = CONFIDENT) -> list[int]:
    found: list[int] = catalog.build("decode.selector", selector)(masked)
    return found


def test_sequential_takes_the_next_from_the_left() -> None:
    assert chosen("sequential") == [0, 1]


def test_static_takes_the_most_confident_and_of_equals_the_first() -> None:
    assert chosen("static") == [1, 3]
    assert chosen("static", Masked([0.5, 0.5, 0.5], [], 1, [0, 1, 2])) == [0]


def test_dynamic_takes_all_the_sure_ones_or_falls_back() -> None:
    assert chosen("dynamic:threshold=0.9") == [1, 3, 4] == chosen("dynamic")
    assert chosen("dynamic:threshold=0.99") == [1, 3]
    assert chosen("dynamic:threshold=1.1") == chosen("static")
    assert chosen("dynamic:threshold=0") == [0, 1, 2, 3, 4]


def test_entropy_fills_its_budget_from_the_surest_up() -> None:
    assert chosen("entropy:threshold=0.6") == [1, 3] == chosen("entropy")  # 0.2 + 0.2 < 0.6, a third would make 0.7
    assert chosen("entropy:threshold=0.75") == [1, 3, 4]
    assert chosen("entropy:threshold=0") == [1]
    assert sorted(chosen("entropy:threshold=100")) == [0, 1, 2, 3, 4]


def leaps(masked: Masked, threshold: float, relaxed: float, radius: int) -> list[int]:
    """LocalLeap, position by position."""
    final = []
    for i, cell in enumerate(masked.cells):
        bar = threshold
        for j, other in enumerate(masked.cells):
            if masked.confidence[j] >= threshold and abs(cell - other) <= radius:
                bar = relaxed
        if masked.confidence[i] >= bar or masked.confidence[i] == max(masked.confidence):
            final.append(i)
    return final


def test_local_leap_asks_less_near_an_anchor() -> None:
    masked = Masked([0.8, 0.6, 0.95, 0.76, 0.8, 0.89], [], 1, [0, 4, 6, 9, 11, 12])
    assert chosen("local_leap:radius=4", masked) == [2, 3]
    assert chosen("local_leap:radius=5", masked) == [2, 3, 4]
    assert chosen("local_leap:radius=6", masked) == [0, 2, 3, 4, 5]
    assert chosen("local_leap", Masked([0.3, 0.8], [], 1, [0, 1])) == [1]  # no anchor: the best one alone


@settings(deadline=None)
@given(
    st.dictionaries(st.integers(0, 31), st.floats(0, 1), min_size=1, max_size=12),
    st.floats(0, 1), st.floats(0, 1), st.integers(0, 32),
)  # fmt: skip
def test_local_leap_is_its_definition(block: dict[int, float], one: float, other: float, radius: int) -> None:
    cells, relaxed, threshold = sorted(block), min(one, other), max(one, other)
    if len(set(block.values())) < len(block):
        return  # of equals only the first is the best one
    masked = Masked([block[cell] for cell in cells], [], 1, cells)

    def leap(relaxed: float, radius: int) -> list[int]:
        return chosen(f"local_leap:threshold={threshold!r},relaxed={relaxed!r},radius={radius}", masked)

    assert leap(relaxed, radius) == leaps(masked, threshold, relaxed, radius)
    plain = [i for i, c in enumerate(masked.confidence) if c >= threshold or c == max(masked.confidence)]
    assert leap(threshold, radius) == leap(relaxed, 0) == plain
    assert set(plain) <= set(leap(relaxed, radius))
    if max(masked.confidence) >= threshold:
        assert leap(relaxed, 32) == [i for i, c in enumerate(masked.confidence) if c >= relaxed]


@pytest.mark.parametrize(("block", "steps"), [(4, 4), (4, 3), (8, 3), (5, 1), (32, 7)])
def test_quotas_sum_to_the_block_with_the_remainder_first(block: int, steps: int) -> None:
    quotas = [quota(block, steps, s) for s in range(steps)]
    assert sum(quotas) == block
    assert quotas == sorted(quotas, reverse=True) and quotas[0] - quotas[-1] <= 1


@settings(deadline=None)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=9), st.integers(1, 9), st.floats(0, 2), st.data())
def test_every_selector_makes_progress(
    confidence: list[float], share: int, threshold: float, data: st.DataObject
) -> None:
    entropies = data.draw(st.lists(st.floats(0, 8), min_size=len(confidence), max_size=len(confidence)))
    gaps = data.draw(st.lists(st.floats(0, 30), min_size=len(confidence), max_size=len(confidence)))
    masked = Masked(confidence, entropies, share, range(len(confidence)), gaps, data.draw(st.floats(0, 1)))
    for name in catalog.names("decode.selector"):
        selector = catalog.build("decode.selector", name)
        for select in (selector, *([replace(selector, threshold=threshold)] if name in ("dynamic", "entropy") else [])):
            found = select(masked)
            assert found and len(set(found)) == len(found) and set(found) <= set(range(len(confidence)))


@pytest.mark.parametrize(
    "text", ["dynamic:threshold=-1", "entropy:threshold=nan", "local_leap:radius=-1", "local_leap:relaxed=0.95"]
)
def test_wrong_knobs_are_named(text: str) -> None:
    with pytest.raises(UserError, match=text.partition(":")[2].partition("=")[0]):
        catalog.build("decode.selector", text)


def test_prophet_finishes_all_once_the_mean_gap_reaches_the_thirds_threshold() -> None:
    def at(progress: float, *gaps: float) -> list[int]:
        odds = [0.5, 0.9, 0.7]
        return chosen("prophet:early=6,middle=4,late=2", Masked(odds, [], 1, [0, 1, 2], gaps, progress))

    assert at(0.0, 6, 6, 6) == [0, 1, 2] and at(0.0, 5, 6, 6) == [1]  # the mean of 5.67 is short of 6
    assert at(0.34, 1, 1, 10) == [0, 1, 2] and at(0.34, 1, 1, 9) == [1]
    assert at(0.67, 2, 2, 2) == [0, 1, 2] and at(1.0, 1, 2, 2) == [1]
    with pytest.raises(UserError, match="middle=9"):
        chosen("prophet:early=8,middle=9")


def test_selectors_are_told_gaps_and_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a real block: gaps are those of the two best logits, and steps are counted from 0 to the last."""
    seen: list[Masked] = []
    prophet = catalog.method("decode.selector", "prophet")
    monkeypatch.setattr(prophet, "__call__", lambda self, masked: seen.append(masked) or [0])
    tiny.run(tiny.engine({"decode": "block_diffusion:block=4,selector=prophet"}), tiny.prompts(8), tiny.greedy(4))
    assert [masked.progress for masked in seen] == [0.0, 0.25, 0.5, 0.75]
    assert [len(masked.gap) for masked in seen] == [4, 3, 2, 1] and all(gap >= 0 for gap in seen[0].gap)
    for masked in seen:  # p1 / p2 = e^gap, so a candidate's odds are at least e^gap / (e^gap + V - 1)
        for odds, gap in zip(masked.confidence, masked.gap):
            assert odds >= math.exp(gap) / (math.exp(gap) + tiny.VOCAB - 1) - 1e-6
            assert odds <= math.exp(gap) / (math.exp(gap) + 1) + 1e-6
