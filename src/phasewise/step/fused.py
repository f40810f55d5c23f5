"""Steps in which nobody looks inside a layer: all layers in one native call, where the model has one (`Model.stack`).

The open path of `forward` computes the same, operator by operator; tests/ops/test_native_stack.py holds them together.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from phasewise.ops.native.spans import Common
from phasewise.ops.native.stack import SLICE, StackSpan

if TYPE_CHECKING:
    from phasewise.model.model import Model
    from phasewise.request.counters import Counters
    from phasewise.step.batch import Batch
    from phasewise.step.span import Span

MOST = 1024  # rows of a call: what more of them need between two layers would no longer lie in a cache


class Scratch:
    """Memory for what a whole step leaves behind. The next step of as many rows writes over it."""

    __slots__ = ("_count", "_x")

    def __init__(self) -> None:
        self._count, self._x = 0, torch.empty(0)

    def take(self, count: int, width: int) -> Tensor:
        """bfloat16 [count, width]; always of one width. With few rows, making a tensor would cost as much as the rest
        of the bookkeeping."""
        if count != self._count:
            self._count, self._x = count, torch.empty((count, width), dtype=torch.bfloat16)
        return self._x


def run_fused(model: Model, batch: Batch, counters: Counters, room: Scratch, open_: list[Span]) -> Tensor | None:
    """The rows after all layers [T, d], their keys and values appended. None, and nothing done, if some spans need more
    than this: those are added to `open_`."""
    stack, spans, rows = model.stack, batch.spans, batch.rows
    if stack is None:
        return None
    windows = [spec.window for spec in model.config.attention if spec.window is not None] if stack.windowed else []
    parts: list[StackSpan] = []
    read = written = 0  # bytes of KV
    for span in spans:
        whole = span.layers is None and span.hidden is None  # all layers, from the tokens on
        plain = whole and span.phase.plain and (span.sees is None or not windows)
        flat = span.kv.flat(span.phase.walk) if plain else None
        if flat is None:
            open_.append(span)
            continue
        end, sees = flat.n + span.rows, span.sees
        far = span.positions[-1] >= end  # rows were given up: a window is counted in positions, not in slots
        if (span.rows > SLICE and (sees is not None or any(end > window for window in windows))) or (windows and far):
            open_.append(span)
            continue
        read += end * flat.row_bytes
        written += span.rows * flat.row_bytes
        parts.append(StackSpan(end, span.rows, None if sees is None else sees.contiguous(), flat.address))
    if open_:
        return None
    x, walk = room.take(rows, stack.hidden), spans[0].phase.walk
    if all(span.phase.walk == walk for span in spans):
        read -= _run(model, batch, x, parts, windows)
    else:
        read -= _by_walk(model, batch, x, parts, windows)
        counters.forwards += len({span.phase.walk for span in spans}) - 1
    for span in spans:
        span.kv.written(span.positions)
        counters.row_layers += span.rows * len(span.phase.walk or span.kv.layers)
    counters.kv_bytes_read += read
    counters.kv_bytes_written += written
    return x


def _by_walk(model: Model, batch: Batch, x: Tensor, parts: Sequence[StackSpan], windows: Sequence[int]) -> int:
    """Spans that run the same layers together, one after the other: each walk reads its weights."""
    groups: dict[tuple[int, ...] | None, list[int]] = {}
    for i, span in enumerate(batch.spans):
        groups.setdefault(span.phase.walk, []).append(i)
    places, saved = [span.slice for span in batch.spans], 0
    for members in groups.values():
        own = Batch([batch.spans[i] for i in members])
        rows = x.new_empty((own.rows, x.shape[1]))
        saved += _run(model, own, rows, [parts[i] for i in members], windows)
        for i in members:
            x[places[i]] = rows[batch.spans[i].slice]
    for span, place in zip(batch.spans, places):
        span.start = place.start
    return saved


def _run(model: Model, batch: Batch, x: Tensor, parts: list[StackSpan], windows: Sequence[int]) -> int:
    """Spans that all run the same layers. -> bytes of KV that were read once for several"""
    walk, saved = batch.spans[0].phase.walk, 0
    stack, turns = model.stack_of(walk), model.turns(batch.end)
    assert stack is not None
    whole = batch.rows <= MOST
    for call in [_Call(batch.numbers, x, batch.spans, parts)] if whole else _calls(batch, x, parts):
        commons: Sequence[Common] = ()
        if len(call.spans) > 1:
            commons = _commons(call.spans, max([part.n for part in call.parts]), windows)
            for common in commons:
                flat = call.spans[common.members[0]].kv.flat(walk)
                saved += common.saved * (0 if flat is None else flat.row_bytes)
        stack(call.numbers, turns, call.parts, call.x, commons)
    return saved


class _Call(NamedTuple):
    """Some consecutive rows of a step: their numbers and x as Stack takes them, and whose they are."""

    numbers: array[int]
    x: Tensor
    spans: list[Span]
    parts: list[StackSpan]


def _calls(batch: Batch, x: Tensor, parts: Sequence[StackSpan]) -> list[_Call]:
    """A step in calls of about MOST rows. Slices of prompts are cut where a call is full: later rows see the earlier
    ones in the KV. No piece has SLICE rows or fewer, for another kernel would round those differently; so no row's
    result depends on the call it is in."""
    found: list[_Call] = []
    spans: list[Span] = []  # of the call that is being filled
    own: list[StackSpan] = []
    start = at = 0

    def close() -> None:
        nonlocal start, spans, own
        if own:
            numbers = batch.numbers[start:at] + batch.numbers[batch.rows + start : batch.rows + at]
            found.append(_Call(numbers, x[start:at], spans, own))
        start, spans, own = at, [], []

    for span, part in zip(batch.spans, parts):
        left = part.rows
        while left:
            space = start + MOST - at
            if space < min(left, SLICE + 1):
                close()
                continue
            take = left if left - space <= SLICE else space
            spans.append(span)
            own.append(part._replace(n=part.n - left + take, rows=take))
            at, left = at + take, left - take
    close()
    return found


def _commons(spans: Sequence[Span], longest: int, windows: Sequence[int]) -> list[Common]:
    """What spans of one attend method read in common; nothing where a window may hide some of it. A slice of a prompt
    reads by itself."""
    if any(window < longest for window in windows):
        return []
    groups: dict[int, tuple[Any, list[int]]] = {}
    for i, span in enumerate(spans):
        flat = span.kv.flat(span.phase.walk)
        if hasattr(span.phase.attend, "commons") and span.rows <= SLICE and flat is not None and not flat.gaps:
            groups.setdefault(id(span.phase.attend), (span.phase.attend, []))[1].append(i)
    return [
        common._replace(members=tuple(index[m] for m in common.members))
        for attend, index in groups.values()
        for common in attend.commons([spans[i] for i in index])
    ]
