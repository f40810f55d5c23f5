"""Blocks on a stride, said as a number of first slots and a window: what the mask shows, to single rows always."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from phasewise.kv.unequal import Narrow
from phasewise.methods.evict._windows import EVERY, Dropping
from phasewise.request.request import Request
from phasewise.step.lower import seen_slots
from phasewise.step.plan import EVERYTHING, AttentionPlan, Window
from phasewise.step.span import Span
from phasewise.verbs.evict import Evict
from tests import tiny
from tests.kv.harness import Walk, cuts

MODEL = tiny.model(layers=3, hidden=16)
NARROW = ((True, True), (False, False), (True, True))


class Striped(Evict):
    """Layers 0 and 2 give up what the window says, and nobody is hidden anything."""

    observes = 0

    def __init__(self, window: Window) -> None:
        self.dropping = Dropping("test", window)
        self.due = self.dropping.due

    def plan(self, span: Span) -> AttentionPlan:
        """Of no matter: nobody asks for logits."""
        return EVERYTHING

    def keep(self, request: Request, layer: int) -> torch.Tensor | None:
        return self.dropping.keep(request, layer) if NARROW[layer][0] else None

    def places(self, layer: int, shape: Any) -> int:
        return int(NARROW[layer][0])


def told(one: Walk, window: Window, rows: int) -> Narrow | None:
    """What native steps are told of the next rows."""
    at, flat = one.request.computed, one.kv.flat(None)
    assert flat is not None
    return seen_slots(window, Span(one.request, one.kv, one.phase, [0] * rows, range(at, at + rows)), flat)


def shown(narrow: Narrow, held: list[int], at: int, row: int) -> set[int]:
    """Positions: of `held` ones and those after them up to row `at + row`, the first and the last slots."""
    slots = [*held, *range(at, at + row + 1)]
    return set(slots[: narrow.sinks]) | set(slots[-narrow.window :])


@settings(max_examples=6, deadline=None)
@given(
    sinks=st.integers(0, 12), window=st.integers(1, 30), stride=st.integers(2, 4), block=st.integers(1, 40),
    sizes=st.lists(st.integers(1, 50), min_size=1, max_size=4), rows=st.integers(1, 6),
)  # fmt: skip
def test_they_show_what_the_mask_shows(
    sinks: int, window: int, stride: int, block: int, sizes: list[int], rows: int
) -> None:
    of, text = Window(sinks, window, stride, block, heads=NARROW), tiny.prompts(170, seed=3)[0]
    one = Walk(MODEL, text, evict=Striped(of))
    for piece in cuts(text, sizes):
        one.feed(piece)
        at = one.request.computed
        for many in {1, rows}:
            narrow = told(one, of, many)
            assert narrow is not None or many > 1, "a single row is always told"
            for row in range(many if narrow is not None else 0):
                held = one.positions(0)
                want = {p for p in range(at + row + 1) if bool(of.seen(torch.tensor(at + row), torch.tensor(p)))}
                assert shown(narrow, held, at, row) == want and one.positions(2) == held  # type: ignore[arg-type]


@pytest.mark.parametrize(("stride", "block"), [(3, 16), (4, 1)])
def test_few_rows_wait(stride: int, block: int) -> None:
    """Rows are dropped in lots, but for those that one which stays has followed."""
    of, text = Window(4, 20, stride, block), tiny.prompts(200, seed=4)[0]
    one, lots = Walk(MODEL, text, evict=Striped(of)), 0
    for token in text:
        before = one.kv.layers[0].n
        one.feed([token])
        lots += one.kv.layers[0].n <= before
        held = one.positions(0)
        gone = one.request.computed - 19
        waits = [p for p in held if p < gone and not bool(of.stays(torch.tensor(p)))]
        assert len(waits) < EVERY and one.positions(1) == list(range(one.request.computed))
        assert waits == list(range(waits[0], waits[-1] + 1)) if waits else True
    runs = len(text) / (stride * block)  # of rows that do not stay
    assert lots <= runs * (1 + (stride - 1) * block / EVERY) + 1


def test_rows_that_lie_otherwise_are_not_told() -> None:
    """Layers that gave up different rows, and rows in front of a hole that the window does not explain."""
    of, text = Window(2, 10, 2, 8, heads=NARROW), tiny.prompts(60, seed=5)[0]

    def fed() -> Walk:
        one = Walk(MODEL, text, evict=Striped(of))
        one.feed(text)
        return one

    assert told(fed(), of, 1) is not None
    assert told(fed(), replace(of, heads=((True, True),) * 3), 1) is None, "layer 1 holds everything"
    one = fed()
    near = torch.arange(one.kv.layers[0].n - 1)
    for layer in (0, 2):
        one.kv.keep(layer, near)
    assert told(one, of, 1) is None, "the last row is missing"
