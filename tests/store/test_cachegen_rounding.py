"""Rounding of rows: nothing further off than half a step, groups by themselves, shallow layers finer."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from phasewise.methods.store._cachegen.rounding import ANCHOR, LEVELS, Level, compress, expand, forms, shrink


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(-28, 36), st.sampled_from([1, 5, 7, 15, 127]))
def test_no_number_is_off_by_more_than_half_a_step(seed: int, magnitude: int, steps: int) -> None:
    x = noise(6, 24, seed=seed) * 10.0**magnitude
    x[2], x[3, 1:] = 0, 0
    rounded = shrink(x, steps)
    assert rounded.symbols.dtype == torch.uint8 and int(rounded.symbols.max()) <= 2 * steps
    error, bound = (rounded.numbers() - x).abs(), rounded.scales.float()[:, None] / (2 * steps)
    assert bool((error <= bound * (1 + 1e-4) + 1e-30).all())
    assert bool((rounded.scales.float() <= x.abs().amax(-1) * 1.004).all()), "no coarser than need be"
    assert not rounded.numbers()[2].any(), "nothing stays nothing"


def test_a_worked_example() -> None:
    rounded = shrink(torch.tensor([[4.0, -4.0, 1.0, 0.3, -1.1, 0.0]]), 4)
    assert rounded.symbols.tolist() == [[8, 0, 5, 4, 3, 4]]
    assert rounded.numbers().tolist() == [[4.0, -4.0, 1.0, 0.0, -1.0, 0.0]]


@pytest.mark.parametrize(("group", "rows"), [(1, 9), (2, 1), (3, 30), (10, 9), (10, 10), (10, 11), (64, 30)])
def test_groups(rows: int, group: int) -> None:
    """The first row of a group at 8 bits, the others within half a step of their difference from it."""
    x, steps = noise(rows, 16), 7
    some = compress(x, steps, group)
    assert [(form.symbols.shape[0], form.steps) for form in some] == forms(rows, steps, group)
    y = expand(some, group)
    if group == 1:
        assert torch.equal(y, shrink(x, steps).numbers())
        return
    assert torch.equal(y[::group], shrink(x[::group], ANCHOR).numbers())
    base = y[::group].repeat_interleave(group, 0)[:rows]
    bound = (x - base).abs().amax(-1, keepdim=True) / (2 * steps)
    assert bool(((y - x).abs()[torch.arange(rows) % group != 0] <= 1.01 * bound[torch.arange(rows) % group != 0]).all())
    again = expand(compress(x[: rows // group * group], steps, group), group) if rows >= group else y[:0]
    assert torch.equal(again, y[: len(again)]), "what a group becomes depends on no other"


def test_groups_help_where_neighbours_are_alike() -> None:
    """What the paper says of a model's rows: then, and only then, differences are the better thing to round."""
    alike = noise(10, 32).repeat_interleave(10, 0) + 0.05 * noise(100, 32, seed=1)
    apart = noise(100, 32)
    for x, better in ((alike, True), (apart, False)):
        plain, grouped = ((expand(compress(x, 7, group), group) - x).norm() for group in (1, 10))
        assert bool(grouped < plain) == better


def test_no_rows_and_no_numbers() -> None:
    for shape in ((0, 8), (3, 0), (0, 0)):
        for group in (1, 4):
            assert expand(compress(torch.empty(shape), 7, group), group).shape == shape


def test_shallow_layers_get_more_steps() -> None:
    level = Level((32, 16, 12), (32, 16))
    assert [level.steps(layer, 32)[0] for layer in (0, 10, 11, 21, 22, 31)] == [15, 15, 7, 7, 5, 5]
    assert [level.steps(layer, 32)[1] for layer in (0, 1, 2, 31)] == [15, 15, 7, 7]
    assert [level.steps(layer, 4) for layer in range(4)] == [(15, 15), (15, 7), (7, 7), (5, 7)]
    assert level.steps(0, 1) == (15, 15)
    for fine, coarse in pairwise(LEVELS):
        pairs = [(fine.steps(layer, 12), coarse.steps(layer, 12)) for layer in range(12)]
        assert all(a >= b for x, y in pairs for a, b in zip(x, y)) and any(x != y for x, y in pairs)
