"""Native steps in halves of layers: what methods are shown there, and that nobody else's rows change by a bit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from phasewise.engine.assembly import kv_shapes
from phasewise.kv.buffer import Ledger
from phasewise.kv.cache import KV
from phasewise.kv.format import Raw, RowFormat
from phasewise.kv.store import Store
from phasewise.methods.attend.dense import Dense
from phasewise.methods.store.int8 import Int8
from phasewise.model.model import Model
from phasewise.ops import native
from phasewise.ops.native.stack import SLICE
from phasewise.request.counters import Counters
from phasewise.request.params import Params
from phasewise.request.request import Request
from phasewise.step.forward import forward
from phasewise.step.phase import Hidden, Phase
from phasewise.step.plan import EVERYTHING, AttentionPlan, Custom, Record
from phasewise.step.read import Read, View
from phasewise.step.reads import attend_all
from phasewise.step.span import Span, ancestors, depths
from phasewise.verbs.attend import Attend
from phasewise.verbs.evict import Evict
from phasewise.verbs.skip import Skip
from tests import tiny
from tests.watched import passes

pytestmark = pytest.mark.skipif(native.library() is None, reason="no native kernels here")
TREE = [-1, 0, 0, 1]


class Reads(Attend):
    """Looks at every layer and reads everything: what it gives must be what whole steps compute."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, Tensor]] = []

    def plan(self, span: Span) -> AttentionPlan:
        return AttentionPlan(Custom(self.attend))

    def attend(self, reads: Sequence[Read]) -> list[Tensor | None]:
        self.seen += [(read.layer, read.q.clone()) for read in reads]
        return [*attend_all(reads)]


class Declines(Reads):
    def attend(self, reads: Sequence[Read]) -> list[Tensor | None]:
        return [None] * len(reads)


class Sometimes(Reads):
    """Looks at spans of one row, and answers in odd layers."""

    def plan(self, span: Span) -> AttentionPlan:
        return super().plan(span) if span.rows == 1 else EVERYTHING

    def attend(self, reads: Sequence[Read]) -> list[Tensor | None]:
        return super().attend(reads) if reads[0].layer % 2 else [None] * len(reads)


class Observes(Evict):
    """An evicting method that keeps copies of the queries; `hides`: and lets rows see all the same, by a mask."""

    observes = 0

    def __init__(self, hides: bool = False) -> None:
        self.seen: list[tuple[int, Tensor]] = []
        self.hides = hides

    def plan(self, span: Span) -> AttentionPlan:
        return AttentionPlan(record=Record(self.take))

    def take(self, read: Read) -> View | None:
        self.seen.append((read.layer, read.q.clone()))
        rows, slots = read.q.shape[0], read.part.size[1]
        return View(torch.ones(1, rows, slots, dtype=torch.bool)) if self.hides and rows == 1 else None


class Ends(Skip):
    """Rows run the first layer and the last."""

    def __init__(self, layers: int) -> None:
        self.walk = (0, layers - 1)

    def rows(self, layer: int, span: Span, x: Tensor) -> Tensor | None:
        assert self.walk is not None
        return None if layer in self.walk else torch.empty(0, dtype=torch.int64)


def phase(attend: Any = None, evict: Any = None) -> Phase:
    return Phase("decode", None, attend or Dense(), evict, None)  # type: ignore[arg-type]


class Runner:
    def __init__(self, model: Model, format: RowFormat | None = None) -> None:
        self.model, self.counters = model, Counters()
        self.store = Store(kv_shapes(model), format or Raw(), ledger=Ledger(64 << 20), counters=self.counters)
        self.held: dict[int, KV] = {}

    @torch.inference_mode()
    def step(self, rows: dict[int, Sequence[int]], phases: dict[int, Phase], taps: set[int] | None = None) -> Hidden:
        """{request: tokens}, a tree for request 9. -> x and taps, copied"""
        spans = []
        for r, tokens in rows.items():
            kv = self.held.setdefault(r, self.store.open(Request([3], Params()), 1))
            n = kv.layers[0].n
            kv.reserve(len(tokens))
            at, sees = (
                ([n + d for d in depths(TREE)], ancestors(TREE)) if r == 9 and n else (range(n, n + len(tokens)), None)
            )
            spans.append(Span(Request([3], Params()), kv, phases.get(r, phase()), tokens, at, sees))
        made = forward(self.model, spans, self.counters, taps)
        kept = Hidden(made.x.clone(), made.count, {tap: x.clone() for tap, x in made.taps.items()})
        for span in spans:
            span.kv.commit([0, 1, 3] if span.sees is not None else span.rows)
        return kept


STEPS: list[dict[int, Sequence[int]]] = [
    {0: [3 + i * 7 % 50 for i in range(SLICE + 20)], 1: range(5, 12), 9: range(7, 20)},
    {1: [6], 0: [5], 9: [4, 5, 6, 7], 2: range(3, 40)},
    {0: [9], 1: [8], 2: [7]},
]


@pytest.fixture(scope="module")
def model() -> Model:
    return Model.load(tiny.checkpoint(hidden=64), dtype=torch.bfloat16)


@pytest.mark.parametrize(("make", "who", "format"), [
    (lambda: phase(Reads()), (0, 1, 2, 9), Int8().format()), (lambda: phase(Declines()), (0,), Raw()),
    (lambda: phase(Sometimes()), (1, 2), Raw()), (lambda: phase(evict=Observes()), (0, 1, 2, 9), Raw()),
], ids=["reads", "declines", "sometimes", "observes"])  # fmt: skip
def test_halves_are_the_whole_step(
    make: Any, who: tuple[int, ...], format: RowFormat, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit, whoever looks and whatever of it is given back; the KV and the counters too."""
    whole, halved, looks = Runner(model, format), Runner(model, format), make()
    made = passes(monkeypatch)
    for rows in STEPS:
        assert torch.equal(halved.step(rows, dict.fromkeys(who, looks)).x, whole.step(rows, {}).x)
    stops = [each.stops for each in made[::2]]
    halves = [2 * at + 1 for at in range(model.config.layers)] + [2 * model.config.layers]
    assert halves in stops and all(each.whole for each in made[1::2])
    for r, kv in whole.held.items():
        for ours, theirs in zip(kv.layers, halved.held[r].layers):
            planes = zip(ours.slabs[0].buffer.planes, theirs.slabs[0].buffer.planes)
            assert ours.n == theirs.n and all(torch.equal(a[:, : ours.n], b[:, : ours.n]) for a, b in planes)
    assert whole.counters == halved.counters


def test_looking_is_being_shown_every_layers_queries(model: Model) -> None:
    """Those of the open path, within the rounding of bfloat16."""
    looks, watches = Reads(), Observes()
    halved = Runner(model)
    rows: dict[int, Sequence[int]] = {0: range(3, 20), 1: range(5, 9)}
    halved.step(rows, {0: phase(looks), 1: phase(evict=watches)})
    kept, model.stack = model.stack, None
    try:
        opened, open_watches = Reads(), Observes()
        Runner(model).step(rows, {0: phase(opened), 1: phase(evict=open_watches)})
    finally:
        model.stack = kept
    for ours, theirs in ((looks.seen, opened.seen), (watches.seen, open_watches.seen)):
        assert [layer for layer, _ in ours] == [layer for layer, _ in theirs] == list(range(model.config.layers))
        for (_, q), (_, other) in zip(ours, theirs):
            assert q.shape == other.shape and float((q - other).float().norm() / other.float().norm()) < 0.03


def test_rows_under_a_view_are_read_as_the_view_says(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    made = passes(monkeypatch)
    whole, viewed = Runner(model), Runner(model)
    some = phase(evict=Observes(hides=True))
    for rows in STEPS:
        got, want = viewed.step(rows, {0: some}).x, whole.step(rows, {}).x
        last = -1 if 0 not in rows else list(rows).index(0)
        assert float((got - want).float().norm() / want.float().norm()) < 0.02 and last >= 0
    assert not any(each.whole for each in made[::2])


def test_taps_are_the_rows_after_their_layers(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside one who looks and without; layers that a walk passes by leave rows as they are."""
    made, layers = passes(monkeypatch), model.config.layers
    taps = set(range(layers))
    plain, looked = Runner(model), Runner(model)
    for rows in STEPS:
        want = plain.step(rows, {}, taps)
        got = looked.step(rows, {0: phase(Declines())}, taps)
        assert torch.equal(got.x, want.x) and torch.equal(got.x, got.taps[layers - 1])
        assert all(torch.equal(got.taps[i], want.taps[i]) for i in taps)
    assert made[0].stops == [2 * i for i in range(1, layers + 1)]
    walking = replace(phase(), skip=Ends(layers))
    walked = Runner(model).step({0: [5, 6, 7]}, {0: walking}, taps)
    assert torch.equal(walked.taps[0], walked.taps[layers - 2]) and torch.equal(walked.taps[layers - 1], walked.x)
    assert not torch.equal(walked.taps[0], walked.x)
