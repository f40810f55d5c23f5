"""Budgets spread over layers and heads: exactly as many rows as the same for all, in the places the papers name."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from phasewise.kv.format import entry_bytes
from phasewise.methods.evict._allot import Spread, allot, pyramid
from phasewise.methods.evict.snapkv import SnapKV
from phasewise.verbs.evict import retain
from tests import oracle, tiny
from tests.evict.running import bound
from tests.kv.harness import Masked, Walk, cuts, walk


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 900), st.integers(1, 1000), st.integers(1, 40), st.floats(1, 50))
def test_a_pyramid_falls_and_its_mean_is_exact(keep: int, rows: int, layers: int, beta: float) -> None:
    budgets = pyramid(keep, rows, layers, beta)
    assert len(budgets) == layers and all(0 <= each <= rows for each in budgets)
    assert sum(budgets) == layers * min(keep, rows)
    assert all(a >= b for a, b in pairwise(budgets))
    if keep >= rows or layers == 1:
        assert len(set(budgets)) == 1
        return
    low = Fraction(keep) / Fraction(beta)  # the card's formula, to within the rounding
    high = 2 * keep - low
    if high >= rows:
        high, low = Fraction(rows), Fraction(2 * keep - rows)
    for layer, budget in enumerate(budgets):
        assert abs(budget - (high - layer * (high - low) / (layers - 1))) < 1


def test_a_pyramid_of_one_is_flat() -> None:
    assert pyramid(10, 100, 5, 1.0) == (10,) * 5
    assert pyramid(10, 100, 3, 20.0) == (20, 10, 0)  # 19.5, 10, 0.5


def competed(scores: list[list[float]], keep: int, least: float) -> list[list[int]]:
    """By the paper, in Python: sure rows of each head first, then the best of all heads' others."""
    heads, sure = len(scores), int(Fraction(least) * keep)
    ranked = [sorted(range(len(own)), key=lambda j: (-own[j], j)) for own in scores]
    rivals = sorted(
        (-scores[h][j], place, h) for h in range(heads) for place, j in enumerate(ranked[h]) if place >= sure
    )
    counts = [sure] * heads
    for _, _, h in rivals[: heads * (keep - sure)]:
        counts[h] += 1
    return [sorted(own[:count]) for own, count in zip(ranked, counts)]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_heads_compete_for_exactly_as_many_rows(data: st.DataObject) -> None:
    heads, n = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 12))
    values = data.draw(st.lists(st.lists(st.integers(0, 6), min_size=n, max_size=n), min_size=heads, max_size=heads))
    keep, recent = data.draw(st.integers(0, n + 2)), data.draw(st.integers(0, 3))
    least = data.draw(st.sampled_from([0.0, 0.2, 0.5, 1.0]))
    scores = torch.tensor(values, dtype=torch.float32)
    got = [slots.tolist() for slots in allot(scores, keep, recent, Spread(heads="ada", least=least))]
    assert sum(map(len, got)) == heads * (min(keep, n) + recent)
    assert all(len(own) >= int(least * min(keep, n)) + recent and own == sorted(set(own)) for own in got)
    last = list(range(n, n + recent))
    want = competed([list(map(float, own)) for own in values], keep, least) if keep < n else [list(range(n))] * heads
    assert got == [own + last for own in want]


def test_equal_heads_get_equal_budgets() -> None:
    for scores in (torch.ones(4, 20), torch.rand(1, 20).expand(4, -1)):
        assert [len(own) for own in allot(scores, 7, 2, Spread(heads="ada"))] == [9] * 4


def test_uniform_is_retain() -> None:
    scores = torch.rand(3, 20)
    assert torch.equal(torch.stack(list(allot(scores, 5, 4))), retain(scores, 5, 4))
    whole = allot(scores, 5, 4, Spread(heads="ada", least=1.0))
    assert torch.equal(torch.stack(list(whole)), retain(scores, 5, 4))


# ---- in SnapKV
CASES: dict[str, dict[str, Any]] = {
    "pyramid": {"layers": "pyramid", "beta": 5.0}, "ada": {"heads": "ada"},
    "both": {"layers": "pyramid", "heads": "ada", "least": 0.4},
}  # fmt: skip


def kept(one: Walk) -> list[list[list[int]]]:
    return [[one.positions(layer, head) for head in range(2)] for layer in range(4)]


@pytest.mark.parametrize(("name", "sizes"), [("pyramid", [90]), ("ada", [11, 5]), ("both", [90])])
def test_rows_and_bytes_are_as_many_as_without(name: str, sizes: list[int]) -> None:
    tokens, total = tiny.prompts(110)[0], {}
    for knobs in ({}, CASES[name]):
        one = Walk(tiny.model(), tokens[:90], evict=bound(SnapKV(keep=24, window=6, **knobs)))
        for piece in cuts(tokens[:90], sizes):
            one.feed(piece)
        stay = kept(one)
        total[len(knobs)] = [[len(head) for head in layer] for layer in stay]
        layer = one.kv.layers[0]
        assert one.kv.live_bytes == 4 * 2 * 24 * entry_bytes(layer.format, layer.shape), "on the byte"
        assert all(head[-6:] == list(range(84, 90)) for each in stay for head in each), "the window is never cut"
        got = torch.cat([one.feed(piece) for piece in cuts(tokens[90:], [1, 1, 4])])

        def sees(layer: int, head: int, q: int, k: int, stay: Any = stay) -> bool:
            return q < 90 or k >= 90 or k in stay[layer][head]

        want = walk(tiny.model(), tokens[:90], [tokens[90:]], evict=Masked(sees))[90:]
        torch.testing.assert_close(got, want, atol=2e-4, rtol=1e-4)
        assert (want - oracle.logits(tiny.checkpoint(), tokens)[90:]).abs().max() > 1e-2
    plain, spread = total[0], total[len(CASES[name])]
    by_layer = [sum(layer) for layer in spread]
    if "layers" in CASES[name]:
        beta = CASES[name].get("beta", 20.0)
        assert by_layer == [2 * (6 + n) for n in pyramid(18, 84, 4, beta)] and by_layer[0] > by_layer[-1]
    else:
        assert by_layer == [48] * 4
    if "heads" in CASES[name]:
        assert any(a != b for a, b in spread), "heads differ, or the test tests little"
        least = CASES[name].get("least", 0.2)
        mean = [n // 2 - 6 for n in by_layer]
        assert all(count >= 6 + int(least * m) for layer, m in zip(spread, mean) for count in layer)
    assert plain == [[24, 24]] * 4


def test_room_for_all_is_dense() -> None:
    tokens = tiny.prompts(60)[0]
    one = Walk(tiny.model(), tokens[:50], evict=bound(SnapKV(keep=50, window=6, **CASES["both"])))
    got = torch.cat([one.feed(tokens[:50]), *(one.feed([token]) for token in tokens[50:])])
    torch.testing.assert_close(got, oracle.logits(tiny.checkpoint(), tokens), atol=2e-4, rtol=1e-4)
