"""Spans that see by blocks, and trees of many rows, in native steps: whole calls, nobody's rows changed by a bit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from phasewise.engine.assembly import kv_shapes
from phasewise.kv.buffer import Ledger
from phasewise.kv.format import Raw, RowFormat
from phasewise.kv.store import Store
from phasewise.methods.attend.dense import Dense
from phasewise.methods.store.int8 import Int8
from phasewise.model.model import Model
from phasewise.ops import native
from phasewise.request.counters import Counters
from phasewise.request.params import Params
from phasewise.request.request import Request
from phasewise.step import fused
from phasewise.step.forward import forward
from phasewise.step.phase import Phase
from phasewise.step.span import Span, ancestors, depths
from tests import tiny
from tests.kv.harness import sliding
from tests.ops.targets import OWN, alike
from tests.watched import passes

pytestmark = pytest.mark.skipif(native.library() is None, reason="no native kernels here")

PLAIN = Phase("decode", None, Dense(), None, None)  # type: ignore[arg-type]


class Rows(NamedTuple):
    tokens: Sequence[int]
    block: int = 1
    parents: Sequence[int] | None = None


def text(rows: int, seed: int) -> list[int]:
    return tiny.prompts(rows, seed=seed)[0]


def tree(rows: int, width: int = 3) -> list[int]:
    return [(i - 1) // width if i else -1 for i in range(rows)]


class Runner:
    """A step of a few requests, each begun by `before` rows."""

    def __init__(self, model: Model, format: RowFormat | None = None, before: int = 7) -> None:
        self.model, self.counters = model, Counters()
        self.store = Store(kv_shapes(model), format or Raw(), ledger=Ledger(64 << 20), counters=self.counters)
        self.before = before

    @torch.inference_mode()
    def step(self, given: Sequence[Rows], first: int = 0) -> list[Tensor]:
        """-> the rows of each after all layers; request i, whose text is its own, counts from `first`."""
        spans = []
        for r, (tokens, block, parents) in enumerate(given, first):
            request = Request([3], Params())
            kv = self.store.open(request, self.before + len(tokens))
            forward(self.model, [Span(request, kv, PLAIN, text(self.before, r), range(self.before))], self.counters)
            kv.commit(self.before)
            at: Sequence[int] = range(self.before, self.before + len(tokens))
            sees = None
            if parents is not None:
                at, sees = [self.before + depth for depth in depths(parents)], ancestors(parents)
            spans.append(Span(request, kv, PLAIN, tokens, at, sees, block=block))
        x = forward(self.model, spans, self.counters).x
        return [x[span.slice].clone() for span in spans]


GIVEN = [
    Rows(text(200, 1), 8), Rows(text(150, 2), parents=tree(150)), Rows(text(12, 3), 4), Rows(text(1, 4)),
    Rows(text(130, 5), 1000), Rows(text(9, 6), parents=tree(9)), Rows(text(100, 7)), Rows(text(20, 8), 32),
]  # fmt: skip


@pytest.fixture(scope="module")
def model() -> Model:
    return Model.load(tiny.checkpoint(hidden=64), dtype=torch.bfloat16)


def far(got: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    ours, theirs = torch.cat(list(got)).float(), torch.cat(list(exact)).float()
    return float((ours - theirs).norm() / theirs.norm())


@pytest.mark.parametrize(("before", "format"), [(1, Int8().format()), (70, Raw())], ids=["int8", "raw"])
def test_a_step_of_all_kinds_is_one_call(
    before: int, format: RowFormat, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As near to float32 as the open path is; each span's rows bit for bit those that it has alone; cut into smaller
    calls, still the same; and the counters of the open path."""
    runner, made = Runner(model, format, before), passes(monkeypatch)
    got = runner.step(GIVEN)
    assert all(each.whole for each in made) and made[-1].rows == sum(len(rows.tokens) for rows in GIVEN)
    for r, rows in enumerate(GIVEN):
        assert torch.equal(Runner(model, format, before).step([rows], r)[0], got[r]), rows
    for most in (65, 100, 256):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(fused, "MOST", most)
            made.clear()
            again = Runner(model, format, before).step(GIVEN)
        assert all(torch.equal(a, b) for a, b in zip(again, got)) and len(made) > len(GIVEN) + 1, "nothing was cut"
    full = Runner(Model.load(tiny.checkpoint(hidden=64), dtype=torch.float32), format, before).step(GIVEN)
    kept, model.stack = model.stack, None
    try:
        opened = Runner(model, format, before)
        plain = opened.step(GIVEN)
    finally:
        model.stack = kept
    assert far(got, full) < 1.5 * far(plain, full) + 1e-3
    assert opened.counters == runner.counters


@pytest.mark.parametrize(("block", "dtype"), [
    (8, torch.float32), (100, torch.float32), (2, torch.bfloat16), (33, torch.bfloat16), (64, torch.bfloat16),
    (500, torch.bfloat16),
], ids=str)  # fmt: skip
def test_blocks_are_the_mask_that_they_stand_for(block: int, dtype: torch.dtype) -> None:
    """On the open path in float32, and natively bit for bit; but many rows read by a matrix unit, which rounds products
    in other places: by less than bfloat16 itself costs."""
    model, exact = (Model.load(tiny.checkpoint(hidden=64), dtype=each) for each in (dtype, torch.float32))
    for rows in (30, 64, 150):
        index = torch.arange(rows) // block
        runner, tokens = Runner(model), text(rows, 1)
        request, sees = Request([3], Params()), index <= index[:, None]
        kv = runner.store.open(request, rows)
        with torch.inference_mode():
            span = Span(request, kv, PLAIN, tokens, range(rows), sees)
            masked = forward(model, [span], runner.counters).x.clone()
            kv.commit(0)
            span = Span(request, kv, PLAIN, tokens, range(rows), block=block)
            by_block = forward(model, [span], runner.counters).x.clone()
            plain = Runner(exact)
            kv = plain.store.open(request, rows)
            full = forward(exact, [Span(request, kv, PLAIN, tokens, range(rows), sees)], plain.counters).x.clone()
        if rows <= fused.SLICE or (dtype == torch.bfloat16 and alike(OWN)):
            assert torch.equal(by_block, masked)
        most = 1e-5 if dtype == torch.float32 else 0.5 * far([masked], [full])
        assert far([by_block], [masked]) < most < 0.05


def test_a_large_tree_begins_with_the_bits_of_a_small_one(model: Model) -> None:
    """And reads what a chain of a node's ancestors reads, which lie in other slots."""
    parents, tokens = tree(150), text(150, 3)
    [whole] = Runner(model).step([Rows(tokens, parents=parents)])
    [small] = Runner(model).step([Rows(tokens[:40], parents=parents[:40])])
    assert torch.equal(small, whole[:40])
    path = [149]
    while parents[path[0]] >= 0:
        path.insert(0, parents[path[0]])
    [chain] = Runner(model).step([Rows([tokens[node] for node in path])])
    assert far([chain], [whole[path]]) < 0.02


@pytest.mark.parametrize(("sizes", "window"), [((1, 3, 9, 27, 81, 29), None), ((100, 50), 40)], ids=str)
def test_trees_that_come_in_pieces_are_native(
    sizes: Sequence[int], window: int | None, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit what the tree has at once; then a path of it is committed, and read by what follows."""
    model = model if window is None else sliding(window, 4, torch.bfloat16, 64)
    parents, tokens = tree(150), text(150, 3)
    [whole], made = Runner(model).step([Rows(tokens, parents=parents)]), passes(monkeypatch)
    runner, request = Runner(model), Request([3], Params())
    kv = runner.store.open(request, 7 + 150 + 1)
    sees, first, found = ancestors(parents), 0, []
    with torch.inference_mode():
        forward(model, [Span(request, kv, PLAIN, text(7, 0), range(7))], runner.counters)
        kv.commit(7)
        for size in sizes:
            end = first + size
            at, own = [7 + depth for depth in depths(parents)[first:end]], sees[first:end, :end]
            span = Span(request, kv, PLAIN, tokens[first:end], at, own, first=first)
            found.append(forward(model, [span], runner.counters).x.clone())
            first = end
        assert torch.equal(torch.cat(found), whole)
        kv.commit([0, 2, 8])
        last = forward(model, [Span(request, kv, PLAIN, [5], [10])], runner.counters).x.clone()
        assert len(made) == len(sizes) + 2 and all(each.whole for each in made)
        again = runner.store.open(Request([3], Params()), 20)
        chain = [*text(7, 0), *(tokens[node] for node in (0, 2, 8)), 5]
        plain = forward(model, [Span(request, again, PLAIN, chain, range(11))], runner.counters).x[-1:]
    assert far([last], [plain]) < 0.02


@pytest.mark.parametrize("width", [1, 3])
def test_trees_under_a_models_own_windows(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole calls while no window ends among a tree's own rows; and what the open path makes of them, always."""
    half, exact = (sliding(40, 4, dtype, 64) for dtype in (torch.bfloat16, torch.float32))
    for rows in (9, 100):
        given, made = [Rows(text(rows, 3), parents=tree(rows, width)), Rows(text(90, 4), 8)], passes(monkeypatch)
        got = Runner(half, before=60).step(given)
        deep = max(depths(tree(rows, width))) >= 40
        assert made[-1].whole and made[-1].rows == (90 if deep else rows + 90)
        full = Runner(exact, before=60).step(given)
        kept, half.stack = half.stack, None
        try:
            opened = Runner(half, before=60).step(given)
        finally:
            half.stack = kept
        assert far(got, full) < 1.5 * far(opened, full) + 1e-3
