"""What single rows attend to, as native steps find it on their way, and rows that they do not see."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from phasewise import catalog
from phasewise.kv.format import Raw, RowFormat
from phasewise.methods.evict._noise import gumbel
from phasewise.methods.store.int8 import Int8
from phasewise.model.model import Model
from phasewise.ops import native
from phasewise.ops.native.weighed import Doubt, Weighed, Weighs
from phasewise.step.phase import Phase
from phasewise.step.plan import EVERYTHING, AttentionPlan, Record
from phasewise.step.probe import Shaped, probe
from phasewise.step.read import Read, View
from phasewise.step.span import Span
from phasewise.verbs.evict import Evict
from tests import tiny
from tests.model.families import FAMILIES
from tests.model.reference import save_random
from tests.ops.test_native_unequal import Runner, prompt
from tests.watched import passes

FORMATS: dict[str, RowFormat] = {"raw": Raw(), "int8": Int8().format()}

pytestmark = pytest.mark.skipif(native.library() is None, reason="no native kernels here")


class Watches(Evict):
    """evict: rows that a test names are not seen, and what the others get of each row is written down."""

    observes = 1

    def __init__(self, model: Model, gone: Tensor, natively: bool, doubt: Doubt | None = None) -> None:
        self.gone, self.got = gone, list[Tensor]()  # bool [layers, h, n]; [layers, H, n + 1] of each row
        self.layers, self.acts = list[Tensor](), cast(Callable[[Span], bool], lambda span: True)
        self.heads, self.doubt = (model.config.kv_heads, model.config.heads), doubt
        self.record = Record(self.view, self._weighs if natively else None)

    def plan(self, span: Span) -> AttentionPlan:
        return AttentionPlan(record=self.record) if self.acts(span) else EVERYTHING

    def _weighs(self, span: Span) -> Weighs:
        n = span.kv.layers[0].n
        gone = self._now(n)
        room = Weighed(*gone.shape[:2], self.heads, n + 1)
        room.gone[:, :, :n] = gone
        return Weighs(room, n, lambda: self.got.append(room.weights[:, :, : n + 1].clone()), self.doubt)

    def _shaped(self, read: Read, found: Tensor, rows: Sequence[int]) -> Tensor:
        assert self.doubt is not None
        if self.doubt.seed is not None:
            (heads, group), keys = found.shape[:2], read.part.positions
            seeds = torch.tensor([self.doubt.seed])
            found = found + gumbel(seeds, read.q_positions, keys, torch.arange(heads), group, read.layer)
        return found * self.doubt.inverse

    def _now(self, n: int) -> Tensor:
        more = n - self.gone.shape[2]
        return torch.nn.functional.pad(self.gone, (0, more))

    def view(self, read: Read) -> View:
        sees = ~torch.nn.functional.pad(self._now(read.part.n)[read.layer], (0, 1))
        read.view = View(sees.expand(read.part.size[0], -1)[:, None])
        shaped = None if self.doubt is None else Shaped(self._shaped)
        self.layers.append(probe(read, [0], shaped).sum((1, 2)))
        if len(self.layers) == len(self.gone):
            self.got.append(torch.stack(self.layers))
            self.layers.clear()
        return read.view


class Watched(Runner):
    """A `Runner` whose tokens are watched."""

    evict: Any = None

    def step(self, rows: dict[int, Sequence[int]], trees: Sequence[int] = ()) -> dict[int, Tensor]:
        plain = Phase("decode", None, catalog.build("attend", "dense"), self.evict, None)  # type: ignore[arg-type]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("tests.ops.test_native_unequal.PLAIN", plain)
            return super().step(rows, trees)


def gone(model: Model, n: int, heads: int, share: float = 0.4) -> Tensor:
    drawn = torch.rand(model.config.layers, heads, n, generator=torch.Generator().manual_seed(n)) < share
    drawn[:, :, 3] = False
    return drawn


@pytest.mark.parametrize(("name", "length", "format", "together"), [
    ("llama", 5, "raw", True), ("gemma2", 130, "raw", False), ("llama", 1100, "int8", False),
    ("gemma2", 1100, "int8", True),
])  # fmt: skip
def test_weights_are_those_of_the_plain_twin(
    name: str, length: int, format: str, together: bool, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With caps of scores, several parts of a plan, rounded KV; and what is not seen gets nothing."""
    config = FAMILIES[name]()
    config.max_position_embeddings = config.sliding_window = 2048
    save_random(config, tmp_path)
    half, full = (Model.load(tmp_path, dtype=dtype) for dtype in (torch.bfloat16, torch.float32))
    hidden, made = gone(half, length, 1 if together else half.config.kv_heads), passes(monkeypatch)
    found = []
    for model, natively in ((half, True), (half, False), (full, False)):
        runner = Watched(model, FORMATS[format], natively)
        runner.step({0: prompt(length)})
        runner.evict = Watches(model, hidden, natively)
        made.clear()
        rows = torch.cat([runner.step({0: [token]})[0] for token in (5, 6)])
        found.append((rows.float(), runner.evict.got))
        assert not natively or [each.whole for each in made] == [True, True]
    (ours, weights), (opened, theirs), (wanted, exact) = found
    assert (ours - wanted).norm() < 1.5 * (opened - wanted).norm() + 1e-3 * wanted.norm()
    for one, other, true in zip(weights, theirs, exact, strict=True):
        assert one.shape == true.shape and (one - true).norm() < 1.5 * (other - true).norm() + 1e-3 * true.norm()
        assert torch.allclose(one.sum(-1), torch.tensor(half.config.heads / half.config.kv_heads), atol=1e-3)
        assert not one[:, :, :length][hidden.expand(-1, one.shape[1], -1)].any()


DOUBTS = {"tempered": Doubt(0.4, None), "noise": Doubt(1.0, -(2**62) - 5), "both": Doubt(1.7, 2**40 + 3)}


@pytest.mark.parametrize(("doubt", "shape", "stay"), [
    ("tempered", (4, 2), "all"), ("noise", (10, 2), "alike"), ("both", (3, 1), "others in each head"),
    ("both", (10, 2), "others in each head"),
])  # fmt: skip
def test_doubted_weights_are_those_of_the_plain_twin(
    doubt: str, shape: tuple[int, int], stay: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of rows whose slots are their positions, or not; and what the row reads knows nothing of doubt."""
    heads, kv_heads = shape
    directory = tiny.checkpoint(hidden=16 * heads, heads=heads, kv_heads=kv_heads)
    half, full = (Model.load(directory, dtype=dtype) for dtype in (torch.bfloat16, torch.float32))
    length, made, found = 150, passes(monkeypatch), []
    drawn = torch.rand(half.config.layers, kv_heads, length, generator=torch.Generator().manual_seed(2))
    slots = drawn[:, : 1 if stay == "alike" else kv_heads].topk(110).indices.sort(-1).values
    slots = slots.expand(-1, kv_heads, -1)
    hidden = gone(half, length if stay == "all" else 110, kv_heads)
    for model, natively, doubted in ((half, True, True), (half, False, True), (full, False, True), (half, True, False)):
        runner = Watched(model, FORMATS["raw"], natively)
        runner.step({0: prompt(length)})
        if stay != "all":
            runner.keep(0, slots.tolist())
        runner.evict = Watches(model, hidden, natively, DOUBTS[doubt] if doubted else None)
        made.clear()
        rows = torch.cat([runner.step({0: [token]})[0] for token in (5, 6, 7)])
        found.append((rows, runner.evict.got))
        assert not natively or [each.whole for each in made] == [True] * 3
    (ours, weights), (_, theirs), (_, exact), (undoubted, plain) = found
    assert torch.equal(ours, undoubted), "what it reads is as it was"
    for one, other, true, bare in zip(weights, theirs, exact, plain, strict=True):
        assert (one[0] - other[0]).norm() < 2e-2 * true[0].norm(), "before any layer has rounded"
        assert (one - true).norm() < 2 * (other - true).norm() + 0.05 * true.norm()
        assert (bare - true).norm() > 0.1 * true.norm(), "doubt changes them"
        assert torch.allclose(one.sum(-1), torch.tensor(heads / kv_heads), atol=1e-3)
        assert not one[:, :, : hidden.shape[2]][hidden].any()


@pytest.mark.parametrize("format", FORMATS)
def test_rows_and_weights_depend_on_no_mates(format: str) -> None:
    model = Model.load(tiny.checkpoint(hidden=64), dtype=torch.bfloat16)
    runners = [Watched(model, FORMATS[format], True) for _ in range(3)]
    for runner in runners:
        runner.step({0: prompt(90), 1: prompt(40, 1)})
    hidden, results = gone(model, 90, model.config.kv_heads), []
    for runner, rows in zip(runners, ({1: [7], 0: [5]}, {0: [5]}, {1: [7]}), strict=True):
        watches = runner.evict = Watches(model, hidden, True)
        watches.acts = lambda span: span.positions[0] == 90
        results.append((runner.step(rows), watches.got))
    (both, (weights,)), (one, (same,)), (other, none) = results
    assert torch.equal(both[0], one[0]) and torch.equal(weights, same)
    assert torch.equal(both[1], other[1]) and not none, "a mate that nobody watches reads all"


class Unequal(Evict):
    """evict: as `Watches`, over heads that hold unequally many rows: of `gone`, by layer and head, all bool [n]."""

    observes = 1

    def __init__(self, model: Model, gone: list[list[Tensor]], natively: bool, doubt: Doubt | None = None) -> None:
        self.gone, self.natively, self.doubt = gone, natively, doubt
        self.heads = (model.config.kv_heads, model.config.heads)
        self.rows, self.got = 0, list[list[Tensor]]()  # of each row, layer by layer and head by head

    def plan(self, span: Span) -> AttentionPlan:
        return AttentionPlan(record=Record(self.view, self._weighs if self.natively else None))

    def _weighs(self, span: Span) -> Weighs:
        counts = [len(own) + self.rows for layer in self.gone for own in layer]
        n, kept = max(counts), len(self.gone[0])
        room = Weighed(len(self.gone), kept, self.heads, n + 3, [n - count for count in counts])
        at = 0
        for own, space in zip((own for layer in self.gone for own in layer), room.rooms, strict=True):
            room.gone[at : at + len(own)] = own
            at += space

        def told() -> None:
            ends = torch.tensor([space for space in room.rooms for _ in range(room.share)]).cumsum(0).tolist()
            lines = room.weights.tensor_split(ends[:-1])
            each = [count + 1 for count in counts for _ in range(room.share)]
            self.got.append([line[:count].clone() for line, count in zip(lines, each, strict=True)])
            self.rows += 1

        return Weighs(room, n, told, self.doubt)

    def view(self, read: Read) -> View:
        heads = list(range(read.part.size[0])) if read.part.heads is None else read.part.heads.tolist()
        own = [self.gone[read.layer][head % len(self.gone[0])] for head in heads]
        gone = torch.stack([torch.nn.functional.pad(each, (0, read.part.size[1] - len(each))) for each in own])
        read.view = View(~gone[:, None])
        found = probe(read, [0], None if self.doubt is None else Shaped(self._shaped)).sum((1, 2))
        if read.layer == 0 and 0 in heads:
            self.got.append([torch.empty(0)] * (len(self.gone) * self.heads[0]))
        for head, weights in zip(heads, found, strict=True):
            self.got[-1][read.layer * self.heads[0] + head] = weights
        return read.view

    def _shaped(self, read: Read, found: Tensor, rows: Sequence[int]) -> Tensor:
        assert self.doubt is not None
        if self.doubt.seed is not None:
            heads = torch.arange(found.shape[0]) if read.part.heads is None else read.part.heads
            keys = read.part.positions
            seeds = torch.tensor([self.doubt.seed])
            found = found + gumbel(seeds, read.q_positions, keys, heads, found.shape[1], read.layer)
        return found * self.doubt.inverse


@pytest.mark.parametrize(("length", "by", "format", "doubt"), [
    (90, "head", "raw", "both"), (90, "layer", "int8", None), (1300, "head", "int8", "tempered"),
    (1300, "layer", "raw", "both"),
])  # fmt: skip
def test_over_heads_that_hold_unequally_many_rows(
    length: int, by: str, format: str, doubt: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows, and the weights of those that there are; a head may hold none, or all, and heads may keep the same."""
    directory = tiny.checkpoint(hidden=64)
    half, full = (Model.load(directory, dtype=dtype) for dtype in (torch.bfloat16, torch.float32))
    layers, heads = half.config.layers, half.config.kv_heads
    draw, made, found = torch.Generator().manual_seed(length), passes(monkeypatch), []
    each = [0, length, *torch.randint(1, length, (layers * heads - 2,), generator=draw).tolist()]
    counts = [[each[layer * heads + (head if by == "head" else 0)] for head in range(heads)] for layer in range(layers)]
    slots = [[sorted(torch.randperm(length, generator=draw)[:count].tolist()) for count in own] for own in counts]
    if by == "layer":
        slots = [[own[0]] * heads for own in slots]
    hidden = [[torch.rand(len(own), generator=draw) < 0.3 for own in layer[: heads if by == "head" else 1]]
              for layer in slots]  # fmt: skip
    how = None if doubt is None else DOUBTS[doubt]
    for model, natively in ((half, True), (half, False), (full, False)):
        runner = Watched(model, FORMATS[format], natively)
        runner.step({0: prompt(length)})
        runner.keep(0, slots)
        runner.evict = Unequal(model, hidden, natively, how)
        made.clear()
        rows = torch.cat([runner.step({0: [token]})[0] for token in (5, 6, 7)])
        found.append((rows.float(), runner.evict.got))
        assert not natively or [each.whole for each in made] == [True] * 3
    (ours, weights), (opened, theirs), (wanted, exact) = found
    assert (ours - wanted).norm() < 1.5 * (opened - wanted).norm() + 1e-3 * wanted.norm()
    for one, other, true in zip(weights, theirs, exact, strict=True):
        assert [len(own) for own in one] == [len(own) for own in true]
        mine, its, right = (torch.cat(own) for own in (one, other, true))
        assert (mine - right).norm() < 2 * (its - right).norm() + 0.05 * right.norm()
        first = sum(len(own) for own in one[:heads])
        assert (mine - its)[:first].norm() < 2e-2 * right[:first].norm(), "before any layer has rounded"
        for own, layer in zip(
            one, (layer[head % len(layer)] for layer in hidden for head in range(heads)), strict=True
        ):
            assert abs(float(own.sum()) - half.config.heads / heads) < 1e-3 and not own[: len(layer)][layer].any()
