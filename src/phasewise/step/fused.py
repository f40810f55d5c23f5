"""Native steps: all layers in one call where nobody looks inside (`Model.stack`), else in halves of layers (`half.py`).

The open path of `forward` computes the same, operator by operator; tests/ops/test_native_stack.py holds them together.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from phasewise.ops.native.spans import Common
from phasewise.ops.native.stack import SLICE, Halves, Rows, Stack, StackSpan, Turns
from phasewise.ops.native.weighed import MOST_SHARING, Weighs
from phasewise.step import forms
from phasewise.step.batch import Batch
from phasewise.step.choice import simple
from phasewise.step.half import run_halves
from phasewise.step.phase import Hidden

if TYPE_CHECKING:
    from phasewise.kv.contiguous import ContiguousView
    from phasewise.model.model import Model
    from phasewise.request.counters import Counters
    from phasewise.step.span import Span

MOST = 1024  # rows of a call: what more of them need between two layers would no longer lie in a cache


class Scratch:
    """Memory for what a native step leaves behind. The next step of as many rows writes over it."""

    __slots__ = ("_between", "_count", "_x")

    def __init__(self) -> None:
        self._count, self._x = 0, torch.empty(0)
        self._between: tuple[Tensor, Tensor, Tensor] | None = None

    def take(self, count: int, width: int) -> Tensor:
        """bfloat16 [count, width]; always of one width. With few rows, making a tensor would cost as much as the rest
        of the bookkeeping."""
        if count != self._count:
            self._count, self._x = count, torch.empty((count, width), dtype=torch.bfloat16)
        return self._x

    def between(self, rows: int, heads_q: int, heads: int, dim: int) -> tuple[Tensor, Tensor, Tensor]:
        """What two halves of a layer need: bfloat16 [rows, heads_q + 2 heads, dim], twice [rows, heads_q, dim]."""
        if self._between is None or self._between[0].shape[0] != rows:
            wide, read, far = (
                torch.empty((rows, each, dim), dtype=torch.bfloat16) for each in (heads_q + 2 * heads, heads_q, heads_q)
            )
            self._between = wide, read, far
        return self._between


def natively(model: Model, spans: Sequence[Span]) -> list[StackSpan | None]:
    """What a native step has to know of each span. None: the model, the span's phase, the part of the depth that it
    runs or the way in which its KV lies needs the open path. No span's mates have a say in it."""
    stack = model.stack
    if stack is None:
        return [None] * len(spans)
    windows = _windows(model)
    parts = [_natively(span, windows, stack) for span in spans]
    for span, part in zip(spans, parts):
        if part is None and span.first:
            span.kv.spread()
    return parts


def _natively(span: Span, windows: Sequence[int], stack: Stack) -> StackSpan | None:
    phase, sees = span.phase, span.sees
    if not phase.walks or (span.layers is not None and not (phase.plain and phase.walk is None)):
        return None
    if span.first and (not phase.plain or any(layer.fresh for layer in span.kv.layers)):
        return None
    flat = span.kv.flat(span.walk)
    if flat is None or (flat.unequal is not None and stack.reading < stack.count):
        return None
    tuned = None if phase.delta is None else phase.delta.table(span.walk or range(stack.count))
    if phase.delta is not None and tuned is None:
        return None
    end = flat.n + span.first + span.rows
    seats = None
    if windows:  # they are counted in positions, where slots are meant
        uneven = flat.gaps and (span.first > 0 or flat.unequal is not None)
        if span.positions[0] > flat.n + span.first or uneven:  # rows were given up
            return None
        if sees is not None:  # of a tree, own slots are others than positions: no window may end among them
            seats = array("q", span.positions)
            if max(seats) - flat.n >= min(windows):
                return None
    own = None if sees is None else sees.contiguous()
    whole = StackSpan(end, span.rows, own, flat.address, seats=seats, block=span.block)
    if tuned is not None:
        whole = whole._replace(tuned=tuned.address)
    if flat.unequal is not None:
        whole = whole._replace(planes=0, unequal=flat.unequal.address, missing=flat.unequal.missing)
    if phase.weighs is not None and not any(w < end for w in windows):
        whole = whole._replace(weighed=_weighed(span, flat, stack, 1 if flat.cuts is None else span.rows))
    if phase.bias is not None:
        whole = phase.bias.natively(span, flat, whole)
    if flat.cuts is not None:
        unasked = whole.weighed is not None or whole.bias or not phase.looks(span)
        return forms.natively(span, flat, flat.cuts, whole) if unasked else None
    if whole.weighed is not None:
        return whole
    if phase.sight is not None and phase.sight.hides(span):
        if phase.sight.heads is None:
            return None if windows else phase.sight.natively(span, flat, whole)
        unasked = phase.reads_all(span) and stack.reading == stack.count and not any(w < end for w in windows)
        if unasked and (narrow := phase.sight.natively(span, flat, whole)) is not None:
            return narrow
    choice = phase.choice
    if choice is None or not choice.acts(span) or stack.capped or any(w < end for w in windows) or phase.watches(span):
        return whole
    if not simple(span, flat, whole):
        return whole
    return choice.natively(span, flat, whole) or whole  # who is asked in each layer


def _weighed(span: Span, flat: ContiguousView, stack: Stack, most: int) -> Weighs | None:
    """How a native step finds what the last row of a span attends to, if its evict method wants nothing else."""
    heads_q, heads, _ = stack.heads
    if span.rows > most or span.sees is not None or span.phase.weighs is None:
        return None
    found = span.phase.weighs(span) if heads_q <= MOST_SHARING * heads else None
    if found is None or found.n != flat.n + span.rows - 1 or any(found.room.begins) != (flat.unequal is not None):
        return None
    found.room.temper(found.doubt, span.positions[-1], 0 if found.doubt is None else flat.places)
    return found


def _windows(model: Model) -> list[int]:
    if model.stack is None or not model.stack.windowed:
        return []
    return [spec.window for spec in model.config.attention if spec.window is not None]


class NativeStep:
    """A forward over spans that are all natively done."""

    def __init__(self, model: Model, counters: Counters, room: Scratch, taps: set[int]) -> None:
        self.model, self.counters, self.room, self.taps = model, counters, room, taps
        self.windows = _windows(model)

    def run(self, batch: Batch, parts: Sequence[StackSpan]) -> Hidden:
        """The rows after all layers [T, d], their keys and values appended; `parts` as `natively` has them."""
        spans, stack = batch.spans, self.model.stack
        assert stack is not None
        x, walk = self.room.take(batch.rows, stack.hidden), spans[0].walk
        run = self._run if all(span.walk == walk for span in spans) else self._by_walk
        kept = run(batch, x, parts)
        for span, part in zip(spans, parts):
            width = self._width(span)
            if part.choice is not None:
                self.counters.kv_bytes_read += part.choice.done()
            if part.weighed is not None:
                part.weighed.told()
            span.kv.written(span.positions)
            if span.layers is not None:  # other layers will have their rows later
                span.kv.spread()
            self.counters.row_layers += span.rows * len(span.walk or span.kv.layers)
            self.counters.kv_bytes_written += span.rows * width
        batch.carry(x, kept)
        return Hidden(x, batch.rows, kept)

    def _by_walk(self, batch: Batch, x: Tensor, parts: Sequence[StackSpan]) -> dict[int, Tensor]:
        """Spans that run the same layers together, one after the other: each walk reads its weights."""
        groups: dict[tuple[int, ...] | None, list[int]] = {}
        for i, span in enumerate(batch.spans):
            groups.setdefault(span.walk, []).append(i)
        places, kept = [span.slice for span in batch.spans], {tap: torch.empty_like(x) for tap in self.taps}
        for members in groups.values():
            own = Batch([batch.spans[i] for i in members])
            rows = x.new_empty((own.rows, x.shape[1]))
            found = self._run(own, rows, [parts[i] for i in members])
            for i in members:
                here = batch.spans[i].slice
                x[places[i]] = rows[here]
                for tap, of_group in found.items():
                    kept[tap][places[i]] = of_group[here]
        for span, place in zip(batch.spans, places):
            span.start = place.start
        self.counters.forwards += len(groups) - 1
        return kept

    def _run(self, batch: Batch, x: Tensor, parts: Sequence[StackSpan]) -> dict[int, Tensor]:
        """Spans that all run the same layers. -> the rows after every layer that is tapped"""
        stack = self.model.stack_of(batch.spans[0].walk)
        assert stack is not None
        try:
            return self._through(stack, batch, x, parts)
        finally:
            self.counters.expert_loads += stack.loaded()

    def _through(self, stack: Stack, batch: Batch, x: Tensor, parts: Sequence[StackSpan]) -> dict[int, Tensor]:
        spans = batch.spans
        turns, numbers, parts = self._turned(batch, parts)
        looking = [i for i, span in enumerate(spans) if not parts[i].alone and span.phase.looks(span)]
        for i, span in enumerate(spans):
            if i not in looking:  # who looks counts for itself
                self.counters.kv_bytes_read += self._reads(span, parts[i])
        if looking or self.taps or any(span.hidden is not None for span in spans):
            plain = [i for i in range(len(spans)) if i not in looking]
            rows = Rows(x, *self.room.between(batch.rows, *stack.heads))
            commons = self._commons(spans, parts, plain)
            halves = Halves(stack, numbers, turns, parts, rows, commons)
            return run_halves(self.model, batch, halves, looking, self.counters, self.taps)
        whole = _Call(numbers, x, spans, parts)
        for call in [whole] if batch.rows <= MOST else _calls(whole, batch.rows):
            stack(
                call.numbers, turns, call.parts, call.x, self._commons(call.spans, call.parts, range(len(call.parts)))
            )
        return {}

    def _turned(self, batch: Batch, parts: Sequence[StackSpan]) -> tuple[Turns, array[int], Sequence[StackSpan]]:
        """The rotations of all rows, with `batch.numbers` and `parts` that count places in them."""
        if batch.end <= self.model.turned:
            return self.model.turns(batch.end), batch.numbers, parts
        near = {part.near: batch.rows + i for i, part in enumerate({p.near: p for p in parts if p.near >= 0}.values())}
        turns = self.model.turns_at([*batch.numbers[batch.rows :], *near])
        numbers = batch.numbers[: batch.rows] + array("q", range(batch.rows))
        return turns, numbers, [part._replace(near=near.get(part.near, -1)) for part in parts]

    def _commons(self, spans: Sequence[Span], parts: Sequence[StackSpan], some: Sequence[int]) -> Sequence[Common]:
        """What `some` of the spans, which read by themselves, read in common; it is counted once."""
        some = [i for i in some if not parts[i].window and not parts[i].alone]
        if len(some) < 2:
            return ()
        commons = _commons(spans, some, max([parts[i].n for i in some]), self.windows)
        for common in commons:
            self.counters.kv_bytes_read -= common.saved * self._width(spans[common.members[0]])
        return commons

    def _reads(self, span: Span, part: StackSpan) -> int:
        """Bytes of KV, and of what is kept beside it, that the rows of a span read by themselves."""
        if part.choice is not None:
            return part.choice.bytes
        if part.sealed is not None:
            stack = self.model.stack_of(span.walk)
            assert stack is not None
            return part.size * stack.reading // stack.count
        return part.reads * self._width(span) - part.missing

    def _width(self, span: Span) -> int:
        """Bytes of one row of its KV, in the layers whose attention runs."""
        flat, stack = span.kv.flat(span.walk), self.model.stack_of(span.walk)
        assert flat is not None and stack is not None, "a span that was natively done a moment ago"
        return flat.row_bytes * stack.reading // stack.count


class _Call(NamedTuple):
    """Some consecutive rows of a step: their numbers and x as Stack takes them, and whose they are."""

    numbers: array[int]
    x: Tensor
    spans: Sequence[Span]
    parts: Sequence[StackSpan]


def _calls(whole: _Call, rows: int) -> list[_Call]:
    """A step in calls of about MOST rows. Slices of prompts are cut where a call is full, only between blocks: later
    rows see the earlier ones in the KV. No piece has SLICE rows or fewer, for another kernel would round those
    differently; so no row's result depends on the call it is in."""
    found: list[_Call] = []
    spans: list[Span] = []  # of the call that is being filled
    own: list[StackSpan] = []
    start = at = 0

    def close() -> None:
        nonlocal start, spans, own
        if own:
            numbers = whole.numbers[start:at] + whole.numbers[rows + start : rows + at]
            found.append(_Call(numbers, whole.x[start:at], spans, own))
        start, spans, own = at, [], []

    for span, part in zip(whole.spans, whole.parts):
        left = part.rows
        block = part.block if part.sees is None else left  # a tree stays whole
        least = (SLICE // block + 1) * block
        while left:
            space = start + MOST - at
            if own and space < min(left, least):
                close()
                continue
            take = max(space // block * block, least)
            take = left if left - take <= SLICE else take
            spans.append(span)
            own.append(part._replace(n=part.n - left + take, rows=take))
            at, left = at + take, left - take
    close()
    return found


def _commons(spans: Sequence[Span], some: Sequence[int], longest: int, windows: Sequence[int]) -> list[Common]:
    """What `some` spans of one attend method read in common; nothing where a window may hide some of it. A slice of a
    prompt reads by itself."""
    if any(window < longest for window in windows):
        return []
    groups: dict[int, tuple[Any, list[int]]] = {}
    for i in some:
        span = spans[i]
        flat = span.kv.flat(span.walk)
        few = span.rows <= SLICE or span.sees is not None
        if hasattr(span.phase.attend, "commons") and few and flat is not None and not flat.gaps:
            groups.setdefault(id(span.phase.attend), (span.phase.attend, []))[1].append(i)
    return [
        common._replace(members=tuple(index[m] for m in common.members))
        for attend, index in groups.values()
        for common in attend.commons([spans[i] for i in index])
    ]
