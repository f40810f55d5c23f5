"""Whole native steps over heads that hold unequally many rows, within a layer or from one layer to the next."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from phasewise import catalog
from phasewise.engine.assembly import kv_shapes
from phasewise.kv.buffer import Ledger
from phasewise.kv.cache import KV
from phasewise.kv.format import Raw, RowFormat
from phasewise.kv.store import Store
from phasewise.methods.store.int8 import Int8
from phasewise.model.model import Model
from phasewise.ops import native
from phasewise.request.counters import Counters
from phasewise.request.params import Params
from phasewise.request.request import Request
from phasewise.step.forward import forward
from phasewise.step.phase import Phase
from phasewise.step.span import Span, ancestors, depths
from tests import tiny
from tests.watched import passes

TREE = [-1, 0, 0, 1, 1, 2]
PLAIN = Phase("decode", None, catalog.build("attend", "dense"), None, None)  # type: ignore[arg-type]
FORMATS: dict[str, RowFormat] = {"raw": Raw(), "int8": Int8().format()}
Kept = list[list[list[int]]]  # of each layer and head, the slots that stay

pytestmark = pytest.mark.skipif(native.library() is None, reason="no native kernels here")


class Runner:
    """Requests whose rows are given up as a test says; natively or on the open path."""

    def __init__(self, model: Model, format: RowFormat, natively: bool) -> None:
        self.model, self.stack = model, model.stack if natively else None
        self.counters = Counters()
        self.store = Store(kv_shapes(model), format, ledger=Ledger(64 << 20), counters=self.counters)
        self.held: dict[int, KV] = {}
        self.lengths: dict[int, int] = {}

    def keep(self, request: int, kept: Kept) -> None:
        for layer, heads in enumerate(kept):
            self.held[request].keep(layer, [torch.tensor(slots, dtype=torch.int64) for slots in heads])

    @torch.inference_mode()
    def step(self, rows: dict[int, Sequence[int]], trees: Sequence[int] = ()) -> dict[int, Tensor]:
        """{request: tokens} -> what comes out of the last layer [R, d]; of a tree its first path is committed."""
        spans = {}
        for r, tokens in rows.items():
            kv = self.held.setdefault(r, self.store.open(Request([3], Params()), 1))
            at = self.lengths.get(r, 0)
            kv.reserve(len(tokens))
            places = [at + depth for depth in depths(TREE)] if r in trees else range(at, at + len(tokens))
            sees = ancestors(TREE) if r in trees else None
            spans[r] = Span(Request([3], Params()), kv, PLAIN, tokens, places, sees)
        stack, self.model.stack = self.model.stack, self.stack
        try:
            x = forward(self.model, list(spans.values()), self.counters).x
        finally:
            self.model.stack = stack
        found = {r: x[span.slice].clone() for r, span in spans.items()}
        for r, span in spans.items():
            path = [0, 1, 3] if r in trees else span.rows
            span.kv.commit(path)
            self.lengths[r] = self.lengths.get(r, 0) + (3 if r in trees else span.rows)
        return found


def prompt(length: int, salt: int = 0) -> list[int]:
    return [3 + (i * 7 + salt) % 50 for i in range(length)]


@pytest.fixture(scope="module")
def models() -> tuple[Model, Model]:
    directory = tiny.checkpoint(hidden=64)
    return Model.load(directory, dtype=torch.bfloat16), Model.load(directory, dtype=torch.float32)


@st.composite
def what_stays(draw: st.DrawFn, length: int, layers: int, heads: int) -> Kept:
    """Every head keeps some of its rows, at least one; now and then a layer keeps them all."""
    slots = st.sets(st.integers(0, length - 1), min_size=1, max_size=length)
    return [[sorted(draw(slots)) for _ in range(heads)] if draw(st.booleans()) else [list(range(length))] * heads
            for _ in range(layers)]  # fmt: skip


@settings(max_examples=5, deadline=None)
@given(st.data())
@pytest.mark.parametrize("format", FORMATS)
def test_as_near_to_float32_as_the_open_path(format: str, models: tuple[Model, Model], data: st.DataObject) -> None:
    """Tokens, several rows and draft trees over whatever stays; and the same rows are counted."""
    half, full = models
    length, shape = data.draw(st.integers(1, 60)), half.config
    kept = data.draw(what_stays(length, shape.layers, shape.kv_heads))
    runners = [Runner(*which) for which in ((half, FORMATS[format], True), (half, FORMATS[format], False),
                                            (full, FORMATS[format], False))]  # fmt: skip
    for runner in runners:
        runner.step({0: prompt(length), 1: prompt(9)})
        runner.keep(0, kept)
        runner.counters.kv_bytes_read = runner.counters.kv_bytes_written = 0
    every = []
    for rows, trees in (({0: [5], 1: [6]}, []), ({0: [7, 8, 9]}, []), ({0: [5, 6, 7, 8, 9, 10]}, [0]), ({0: [4]}, [])):
        every.append([runner.step(rows, trees)[0] for runner in runners])
    ours, opened, wanted = (torch.cat(each).float() for each in zip(*every, strict=True))
    assert (ours - wanted).norm() < 1.5 * (opened - wanted).norm() + 1e-3 * wanted.norm()
    for counter in ("kv_bytes_read", "kv_bytes_written"):
        assert getattr(runners[0].counters, counter) == getattr(runners[1].counters, counter), counter


@pytest.mark.parametrize("format", FORMATS)
def test_rows_depend_on_no_mates_and_no_pieces(
    format: str, models: tuple[Model, Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit, and every step is one native call; heads longer than a part of a plan among them."""
    model = models[0]
    heads, made = model.config.kv_heads, passes(monkeypatch)
    lengths = {0: 1200, 1: 70}
    kept = {r: [[list(range(layer + head, n, 1 + (layer * heads + head) % 3)) for head in range(heads)]
                for layer in range(model.config.layers)] for r, n in lengths.items()}  # fmt: skip
    together, alone = Runner(model, FORMATS[format], True), Runner(model, FORMATS[format], True)
    for runner in (together, alone):
        for r, n in lengths.items():
            runner.step({r: prompt(n, r)})
            runner.keep(r, kept[r])
    made.clear()
    both = [together.step({0: [5], 1: [6, 7, 8]}), together.step({1: [9], 0: [4]})]
    single = {0: [alone.step({0: [5]}), alone.step({0: [4]})],
              1: [alone.step({1: [token]}) for token in (6, 7, 8, 9)]}  # fmt: skip
    assert len(made) == 8 and all(each.whole for each in made)
    for r in (0, 1):
        assert torch.equal(torch.cat([step[r] for step in both]), torch.cat([step[r] for step in single[r]]))


@pytest.mark.parametrize("format", FORMATS)
def test_slices_of_prompts(format: str, models: tuple[Model, Model], monkeypatch: pytest.MonkeyPatch) -> None:
    """Near to float32 as the open path is, in one native call; and what a row gives hangs on no cut and no mate."""
    (half, full), made = models, passes(monkeypatch)
    shape, draw = half.config, random.Random(0)
    runners = [Runner(*which) for which in ((half, FORMATS[format], True), (half, FORMATS[format], False),
                                            (full, FORMATS[format], False), (half, FORMATS[format], True))]  # fmt: skip
    kept = [[sorted(draw.sample(range(150), draw.choice([1, draw.randint(1, 150), 150])))
             for _ in range(shape.kv_heads)] for _ in range(shape.layers)]  # fmt: skip
    for runner in runners:
        runner.step({0: prompt(150)})
        runner.keep(0, kept)
        runner.counters.kv_bytes_read = runner.counters.kv_bytes_written = 0
    made.clear()
    whole, opened, wanted = (runner.step({0: prompt(300, 7)})[0].float() for runner in runners[:3])
    assert len(made) == 1 and made[0].whole
    assert (whole - wanted).norm() < 1.5 * (opened - wanted).norm() < 0.2 * wanted.norm()
    for counter in ("kv_bytes_read", "kv_bytes_written"):
        assert getattr(runners[0].counters, counter) == getattr(runners[1].counters, counter), counter
    at, pieces = 0, []
    for rows in (65, 130, 105):
        pieces.append(runners[3].step({0: prompt(300, 7)[at : at + rows], 1: prompt(rows, 3)})[0].float())
        at += rows
    assert torch.equal(torch.cat(pieces), whole) and all(each.whole for each in made)


def test_steps_of_several_calls(models: tuple[Model, Model], monkeypatch: pytest.MonkeyPatch) -> None:
    """A slice of more rows than a call takes has the bits that it has in smaller ones."""
    model = models[0]
    once, twice = Runner(model, Raw(), True), Runner(model, Raw(), True)
    for runner in (once, twice):
        runner.step({0: prompt(70)})
        heads = [[*range(head, 70, 2 + head)] for head in range(model.config.kv_heads)]
        runner.keep(0, [heads] * model.config.layers)
    text = [3 + i % 50 for i in range(1400)]
    pieces = [twice.step({0: text[:800]})[0], twice.step({0: text[800:]})[0]]
    assert torch.equal(once.step({0: text})[0], torch.cat(pieces))
