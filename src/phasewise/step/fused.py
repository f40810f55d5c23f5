"""Native steps: all layers in one call (`Model.stack`), or in halves of layers where a plan needs it (`half.py`).

The open path of `forward` computes the same, operator by operator; tests/ops/test_native_stack.py holds them together.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple
from weakref import ref

import torch
from torch import Tensor

from phasewise.ops.native.spans import Common
from phasewise.ops.native.stack import SLICE, Halves, PassBuffers, Stack, StackSpan, Turns, seen_slots
from phasewise.step.batch import Batch
from phasewise.step.half import run_halves
from phasewise.step.lower import KeptForm, Lowered, windows_of
from phasewise.step.phase import Hidden
from phasewise.step.shared import in_common

if TYPE_CHECKING:
    from phasewise.model.model import Model
    from phasewise.request.counters import Counters
    from phasewise.step.plan import SharedPrefix
    from phasewise.step.span import Span

MOST = 1024  # rows of a call: what more of them need between two layers would no longer lie in a cache


class Scratch:
    """Memory for what a native step leaves behind. The next step of as many rows writes over it. `kept`: the call of
    the last step, where the next one may use it again."""

    __slots__ = ("_between", "_count", "_x", "kept")

    def __init__(self) -> None:
        self._count, self._x = 0, torch.empty(0)
        self.kept: KeptStep | None = None
        self._between: tuple[Tensor, Tensor, Tensor] | None = None

    @property
    def x(self) -> Tensor:
        """The memory that `take` has given last."""
        return self._x

    def take(self, count: int, width: int) -> Tensor:
        """bfloat16 [count, width]; always of one width. With few rows, making a tensor would cost as much as the rest
        of the bookkeeping."""
        if count != self._count:
            self._count, self._x = count, torch.empty((count, width), dtype=torch.bfloat16)
        return self._x

    def between(self, rows: int, heads_q: int, heads: int, dim: int) -> tuple[Tensor, Tensor, Tensor]:
        """Buffers between two halves of a layer: bfloat16 [rows, heads_q + 2 heads, dim], twice [rows, heads_q,
        dim]."""
        if self._between is None or self._between[0].shape[0] != rows:
            wide, read, far = (
                torch.empty((rows, each, dim), dtype=torch.bfloat16) for each in (heads_q + 2 * heads, heads_q, heads_q)
            )
            self._between = wide, read, far
        return self._between


class KeptStep:
    """The native call of a step of single rows, for the steps after it.

    While the same requests come in the same order, each with a form that still serves it (`lower.KeptForm`), their next
    step differs in tokens, positions and the numbers of rows that are read: those alone are written into the call. It
    holds on to no KV.
    """

    __slots__ = ("_forms", "_halves", "_missing", "_row_layers", "_stack", "_stops", "_walk", "_widths", "_windows")

    def __init__(
        self, spans: Sequence[Span], forms: Sequence[KeptForm], halves: Halves, stack: Stack, saved: int,
        widths: Sequence[int], stops: Sequence[tuple[int, int]],
    ) -> None:  # fmt: skip
        """`saved`: bytes of KV that are read once for several spans. `widths`: bytes of one row of each span. `stops`:
        see `stops_at`."""
        self._forms, self._halves, self._stack = [ref(form) for form in forms], halves, stack
        self._stops = stops
        self._walk, self._widths = spans[0].walk, widths
        self._missing = saved + sum(form.part.missing for form in forms)
        self._windows = [(form.part.window, form.part.sinks) for form in forms]
        self._row_layers = sum(len(span.walk or span.kv.layers) for span in spans)

    def ends(self, batch: Batch, model: Model, x: Tensor, taps: set[int]) -> list[int] | None:
        """The slots at which the rows of `batch` end, if this is the call of a step that writes them to x and is tapped
        so."""
        if len(batch.spans) != len(self._forms) or x is not self._halves.x or batch.end > model.turned:
            return None
        if len(taps) != len(self._stops) or not all(tap in taps for tap, _ in self._stops):
            return None
        found: list[int] = []
        for span, known in zip(batch.spans, self._forms):
            flat = span.kv.layout
            form = known()
            if flat is None or form is None or flat.lowered is not form:
                return None
            if span.hidden is not None or not form.serves(span, flat):
                return None
            found.append(flat.n + 1)
        return found if model.stack_of(self._walk) is self._stack else None

    def run(self, batch: Batch, ends: Sequence[int], model: Model, counters: Counters) -> Hidden:
        """The rows after all layers [T, d], their keys and values appended."""
        read = -self._missing
        for n, width, (window, sinks) in zip(ends, self._widths, self._windows):
            read += (seen_slots(n, 1, window, sinks) if window else n) * width
        try:
            kept = self._halves.again(batch.numbers, model.turns(batch.end), ends, self._stops)
        finally:
            counters.expert_loads += self._stack.loaded()
        for span in batch.spans:
            span.kv.written(span.positions)
        counters.kv_bytes_read += read
        counters.row_layers += self._row_layers
        counters.kv_bytes_written += sum(self._widths)
        return Hidden(self._halves.x, batch.rows, kept)


class NativeStep:
    """A forward over spans that are all natively done."""

    def __init__(self, model: Model, counters: Counters, room: Scratch, taps: set[int]) -> None:
        self.model, self.counters, self.room, self.taps = model, counters, room, taps
        self.windows = windows_of(model)

    def run(self, batch: Batch, lowered: Sequence[Lowered]) -> Hidden:
        """The rows after all layers [T, d], their keys and values appended."""
        spans, stack = batch.spans, self.model.stack
        assert stack is not None
        x, walk = self.room.take(batch.rows, stack.hidden), spans[0].walk
        run = self._run if all(span.walk == walk for span in spans) else self._by_walk
        kept = run(batch, x, lowered)
        for span, (part, _, _) in zip(spans, lowered):
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

    def _by_walk(self, batch: Batch, x: Tensor, lowered: Sequence[Lowered]) -> dict[int, Tensor]:
        """Spans that run different layers; see `_by_layer` for those that can share what they run."""
        places = [span.slice for span in batch.spans]
        try:
            few = batch.rows <= MOST and not self.taps
            if few and all(_divides(span, each) for span, each in zip(batch.spans, lowered)):
                return self._by_layer(batch, x, lowered)
            return self._by_group(batch, x, lowered)
        finally:
            for span, place in zip(batch.spans, places):
                span.start = place.start

    def _by_layer(self, batch: Batch, x: Tensor, lowered: Sequence[Lowered]) -> dict[int, Tensor]:
        """Each layer runs over the rows of the spans that take it, and its weights are read once. Consecutive layers
        with the same spans are one native call."""
        spans, places = batch.spans, [span.slice for span in batch.spans]
        for span, each in zip(spans, lowered):
            self.counters.kv_bytes_read += self._reads(span, each.part)
        x.copy_(self.model.embed(batch.tokens))
        ran = [0] * len(spans)  # layers of its own that each span has run
        for layers, members in _sections(spans, self.model.config.layers):
            stack = self.model.stack_of(layers)
            assert stack is not None
            heads_q, heads, _ = stack.heads
            mine = [lowered[i].part.behind(ran[i], heads_q, heads) for i in members]
            own = batch if len(members) == len(spans) else Batch([spans[i] for i in members])
            rows = x if own is batch else torch.cat([x[places[i]] for i in members])
            turns, numbers, parts = self._turned(own, mine)
            halves = Halves(stack, numbers, turns, parts, PassBuffers(rows))
            halves.enter(rows)
            try:
                halves.upto(2 * len(layers))
            finally:
                self.counters.expert_loads += stack.loaded()
            for i in members:
                ran[i] += len(layers)
                if own is not batch:
                    x[places[i]] = rows[spans[i].slice]
        return {}

    def _by_group(self, batch: Batch, x: Tensor, lowered: Sequence[Lowered]) -> dict[int, Tensor]:
        """Spans that run the same layers together, one group after the other: each reads its weights."""
        groups: dict[tuple[int, ...] | None, list[int]] = {}
        for i, span in enumerate(batch.spans):
            groups.setdefault(span.walk, []).append(i)
        places, kept = [span.slice for span in batch.spans], {tap: torch.empty_like(x) for tap in self.taps}
        for members in groups.values():
            own = Batch([batch.spans[i] for i in members])
            rows = x.new_empty((own.rows, x.shape[1]))
            found = self._run(own, rows, [lowered[i] for i in members])
            for i in members:
                here = batch.spans[i].slice
                x[places[i]] = rows[here]
                for tap, of_group in found.items():
                    kept[tap][places[i]] = of_group[here]
        self.counters.forwards += len(groups) - 1
        return kept

    def _run(self, batch: Batch, x: Tensor, lowered: Sequence[Lowered]) -> dict[int, Tensor]:
        """Spans that all run the same layers. -> the rows after every layer that is tapped"""
        stack = self.model.stack_of(batch.spans[0].walk)
        assert stack is not None
        try:
            return self._through(stack, batch, x, lowered)
        finally:
            self.counters.expert_loads += stack.loaded()

    def _through(self, stack: Stack, batch: Batch, x: Tensor, lowered: Sequence[Lowered]) -> dict[int, Tensor]:
        spans = batch.spans
        turns, numbers, parts = self._turned(batch, [each.part for each in lowered])
        by_layer = [i for i, each in enumerate(lowered) if each.by_layer]
        plain = [i for i in range(len(spans)) if i not in by_layer]  # the others are counted there
        self.counters.kv_bytes_read += sum(self._reads(spans[i], parts[i]) for i in plain)
        stops = stops_at(self.taps, spans[0].walk or range(self.model.config.layers))
        if by_layer or stops is None or any(span.hidden is not None for span in spans):
            rows = PassBuffers(x, *self.room.between(batch.rows, *stack.heads))
            halves = Halves(stack, numbers, turns, parts, rows, self._commons(spans, parts, plain))
            return run_halves(self.model, batch, halves, by_layer, self.counters, self.taps)
        if batch.rows <= MOST:
            commons = self._commons(spans, parts, plain)
            halves = Halves(stack, numbers, turns, parts, PassBuffers(x), commons)
            kept = halves.through(stops)
            self.room.kept = self._kept(batch, [each.form for each in lowered], halves, stack, commons, stops)
            return kept
        return self._in_calls(stack, turns, _calls(_Call(numbers, x, spans, parts), batch.rows), stops)

    def _in_calls(
        self, stack: Stack, turns: Turns, calls: Sequence[_Call], stops: Sequence[tuple[int, int]]
    ) -> dict[int, Tensor]:
        """A step's rows, some after the others."""
        found: list[dict[int, Tensor]] = []
        for call in calls:
            commons = self._commons(call.spans, call.parts, range(len(call.parts)))
            halves = Halves(stack, call.numbers, turns, call.parts, PassBuffers(call.x), commons)
            found.append(halves.through(stops))
        return {tap: torch.cat([kept[tap] for kept in found]) for tap in self.taps}

    def _kept(
        self, batch: Batch, forms: Sequence[KeptForm | None], halves: Halves, stack: Stack, commons: Sequence[Common],
        stops: Sequence[tuple[int, int]],
    ) -> KeptStep | None:  # fmt: skip
        """The call for steps to come; None where they may differ in more than `KeptStep` knows."""
        known = [form for form in forms if form is not None]
        if len(known) < len(forms) or batch.end > self.model.turned:
            return None
        if commons and self.windows:  # a window ends them as soon as it hides some of their rows
            return None
        widths = [self._width(span) for span in batch.spans]
        saved = sum(common.saved * widths[common.members[0]] for common in commons)
        return KeptStep(batch.spans, known, halves, stack, saved, widths, stops)

    def _turned(self, batch: Batch, parts: Sequence[StackSpan]) -> tuple[Turns, array[int], Sequence[StackSpan]]:
        """The rotations of all rows, with `batch.numbers` and `parts` that count places in them."""
        if batch.end <= self.model.turned:
            return self.model.turns(batch.end), batch.numbers, parts
        near = {part.near: batch.rows + i for i, part in enumerate({p.near: p for p in parts if p.near >= 0}.values())}
        turns = self.model.turns_at([*batch.numbers[batch.rows :], *near])
        numbers = batch.numbers[: batch.rows] + array("q", range(batch.rows))
        return turns, numbers, [part._replace(near=near.get(part.near, -1)) for part in parts]

    def _commons(self, spans: Sequence[Span], parts: Sequence[StackSpan], some: Sequence[int]) -> Sequence[Common]:
        """The prefixes that `some` of the spans, which read by themselves, read in common; each is counted once."""
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


def stops_at(taps: set[int], layers: Sequence[int]) -> list[tuple[int, int]] | None:
    """Where a pass over these layers stops so that rows after the layers `taps` are copied: (tap, half) in order. A
    layer that does not run leaves rows as the one before it; None if no layer runs before one of them."""
    stops = [(tap, 2 * sum(layer <= tap for layer in layers)) for tap in sorted(taps)]
    return None if any(not half for _, half in stops) else stops


def _divides(span: Span, lowered: Lowered) -> bool:
    """True if a span's layers may run in several native calls, with other spans in each."""
    whole = span.layers is None and span.hidden is None and span.plan.shared is None
    return whole and not lowered.by_layer and lowered.part.divides


def _sections(spans: Sequence[Span], layers: int) -> list[tuple[tuple[int, ...], list[int]]]:
    """Consecutive layers that the same spans run, and which spans these are."""
    walks = [span.walk for span in spans]
    found: list[tuple[tuple[int, ...], list[int]]] = []
    for layer in range(layers):
        members = [i for i, walk in enumerate(walks) if walk is None or layer in walk]
        if found and found[-1][1] == members:
            found[-1] = (*found[-1][0], layer), members
        elif members:
            found.append(((layer,), members))
    return found


class _Call(NamedTuple):
    """Some consecutive rows of a step: their numbers and x as Stack takes them, and whose they are."""

    numbers: array[int]
    x: Tensor
    spans: Sequence[Span]
    parts: Sequence[StackSpan]


def _calls(whole: _Call, rows: int) -> list[_Call]:
    """A step in calls of about MOST rows. Slices of prompts are cut where a call is full, only between blocks: later
    rows see the earlier ones in the KV. No piece has SLICE rows or fewer, for with a matrix unit another kernel would
    round those differently; so no row's result depends on the call it is in."""
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
    """The prefixes that `some` spans, whose plans share them, read in common; none where a window may hide some of it.
    A slice of a prompt reads by itself."""
    if any(window < longest for window in windows):
        return []
    groups: dict[SharedPrefix, list[int]] = {}
    for i in some:
        span = spans[i]
        how = span.plan.shared
        if how is None or (span.rows > SLICE and span.sees is None):
            continue
        flat = span.kv.flat(span.walk)
        if flat is not None and not flat.gaps:
            groups.setdefault(how, []).append(i)
    return [
        common._replace(members=tuple(index[m] for m in common.members))
        for how, index in groups.items()
        for common in in_common([spans[i] for i in index], how)
    ]
