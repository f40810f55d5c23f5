"""One pass of a model over the ragged rows of many spans; every span's rows read what its own plan says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from phasewise.kv.format import entry_bytes
from phasewise.model.lowrank import Delta, Deltas
from phasewise.request.counters import Counters
from phasewise.step import reference
from phasewise.step.batch import Batch
from phasewise.step.forms import Group, groups, parts
from phasewise.step.fused import NativeStep, Scratch
from phasewise.step.inside import Inside
from phasewise.step.late import Late
from phasewise.step.lower import Lowered, lower_all
from phasewise.step.phase import Hidden
from phasewise.step.plan import AttentionPlan
from phasewise.step.read import Read
from phasewise.step.reads import answered, put, queries_of
from phasewise.step.span import Span

if TYPE_CHECKING:
    from phasewise.model.model import Model


@dataclass(slots=True)
class _Entry:
    """A span at one layer: the rows of the layer's input it occupies and, if some skip, which of its rows they are.

    Of rows that run `late`, which come first, that is the row they run with.
    """

    span: Span
    at: slice
    positions: Sequence[int]
    ids: list[int] | None = None
    late: Sequence[int] = ()


def _low_rank(entry: _Entry) -> list[tuple[Delta, Sequence[int]]]:
    """Low-rank weights of a span, and those rows of the layer's input that run with them."""
    span, every = entry.span, range(entry.at.start, entry.at.stop)
    if span.tuned is None:
        return [] if span.delta is None else [(span.delta, every)]
    ids = range(span.rows) if entry.ids is None else entry.ids
    first = [at for at, row in zip(every, ids) if row < span.untuned]
    last = [at for at, row in zip(every, ids) if row >= span.untuned]
    return [(delta, rows) for delta, rows in ((span.delta, first), (span.tuned, last)) if delta is not None and rows]


class OpenStep:
    """The open path: the context a layer runs in (`rotary`, `attend`, `count`), for one forward over `batch`."""

    def __init__(self, model: Model, batch: Batch, counters: Counters, taps: set[int]) -> None:
        self.model, self.batch, self.counters, self.taps = model, batch, counters, taps
        self.inside = Inside(model, counters)
        self._rotary = model.rotary(batch.positions, batch.end)
        self._forms: dict[int, list[Group]] = {}  # by span, of those that read sealed rows

    def _use(self, entries: list[_Entry], rotary: Any) -> None:
        self.rotary = rotary
        groups: dict[int, tuple[AttentionPlan, list[_Entry]]] = {}  # spans of one plan are read together
        for entry in entries:
            groups.setdefault(id(entry.span.plan), (entry.span.plan, []))[1].append(entry)
        self._groups = list(groups.values())
        self.deltas = self._deltas(entries)

    def _deltas(self, entries: Sequence[_Entry]) -> Deltas | None:
        """Which rows of the next call run with which low-rank weights; None: none do."""
        groups: dict[int, tuple[Delta, list[int]]] = {}
        for entry in entries:
            for delta, rows in _low_rank(entry):
                groups.setdefault(id(delta), (delta, []))[1].extend(rows)
        if not groups:
            return None
        found, every = [*groups.values()], sum(entry.at.stop - entry.at.start for entry in entries)
        if len(found[0][1]) == every:
            return Deltas([(found[0][0], None)])
        return Deltas([(delta, torch.tensor(rows, device=self.model.device)) for delta, rows in found])

    # ---- what the model's layers call
    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [T, Hq, D], k, v [T, H, D] -> [T, Hq, D]; every span's rows read what its plan says."""
        out = torch.empty_like(q)
        k, v = k.transpose(0, 1), v.transpose(0, 1)  # [H, T, D]
        form, width = None, 0  # of the last entry's rows: their format, and the bytes of one
        for plan, entries in self._groups:
            reads: list[Read] = []
            for entry in entries:
                cache = entry.span.kv.layers[layer]
                if cache.format is not form:
                    form, width = cache.format, entry_bytes(cache.format, cache.shape) * cache.shape.heads
                self.counters.kv_bytes_written += (entry.at.stop - entry.at.start) * width
                cache.append(k[:, entry.at], v[:, entry.at], entry.positions, entry.ids)
                reads.extend(self._reads(layer, entry, q[entry.at]))
            for read in reads:
                reference.look(read.span.plan, read)
            for read, result in zip(reads, answered(reads, reference.attend(plan, reads))):
                put(out, read, result, k.shape[0])
        return out

    def _reads(self, layer: int, entry: _Entry, q: Tensor) -> list[Read]:
        reads = []
        cache = entry.span.kv.layers[layer]
        if cache.blocks is not None and cache.blocks.active:
            return self._sealed_reads(layer, entry, q)
        for part in cache.read():
            read = Read(self.inside, layer, entry.span, queries_of(part, q, cache.shape.heads), part)
            read.at, read.rows, read.late = entry.at, entry.ids, entry.late
            reads.append(read)
        return reads

    def _sealed_reads(self, layer: int, entry: _Entry, q: Tensor) -> list[Read]:
        """A read for the rows of each form: as if they had come by themselves."""
        cache, span = entry.span.kv.layers[layer], entry.span
        found = self._forms.get(id(span))
        if found is None:
            found = self._forms[id(span)] = groups(span, cache)
        reads = []
        for group, part in zip(found, parts(cache, found)):
            read = Read(self.inside, layer, group.span, q if group.span is span else q[group.rows], part)
            read.at = entry.at if group.span is span else group.rows + entry.at.start
            reads.append(read)
        return reads

    def count(self, counter: str, n: int) -> None:
        self.counters.count(counter, n)

    # ---- the walk through the layers
    def run(self) -> Hidden:
        """-> the rows after their last layer of this step, [T, d]."""
        self._all = [_Entry(s, s.slice, s.positions) for s in self.batch.spans]
        self._use(self._all, self._rotary)
        x = self.model.embed(self.batch.tokens)
        for span in self.batch.spans:
            if span.hidden is not None:
                x[span.slice] = span.hidden
        plain = all(s.layers is None and s.phase.skip is None for s in self.batch.spans)
        kept: dict[int, Tensor] = {}
        for i in range(self.model.config.layers):
            if plain:
                self.counters.row_layers += self.batch.rows
                self.inside.x = x
                x = self.model.layer(i, x, self, self.deltas)
            else:
                x = self._layer_for_some(i, x)
            if i in self.taps:
                kept[i] = x
        self.batch.carry(x, kept)
        return Hidden(x, self.batch.rows, kept)

    def _layer_for_some(self, i: int, x: Tensor) -> Tensor:
        """Run layer i for the rows whose span and skip method want it; the others pass through unchanged."""
        late = self._late(i)
        entries, index = self._active(i, x, late)
        total, count = len(index), x.shape[0]
        self.counters.row_layers += total
        if total == count and not late:
            self._use(self._all, self._rotary)
            self.inside.x = x
            return self.model.layer(i, x, self, self.deltas)
        if total == 0:
            return x
        rows, rotary = torch.tensor(index, device=x.device), self._rotary
        if late:  # behind the others
            known = [position for each in late.values() for position in each.positions]
            positions = torch.cat((self.batch.positions, torch.tensor(known, device=x.device)))
            rotary = self.model.rotary(positions, self.batch.end)
            x = torch.cat((x, *(each.x for each in late.values())))
        self._use(entries, rotary.take(rows))
        self.inside.x = x[rows]
        x = x.index_copy(0, rows, self.model.layer(i, self.inside.x, self, self.deltas))
        at = count
        for span, each in late.items():
            assert span.phase.ran is not None
            span.phase.ran(i, span, x[at : at + len(each.positions)])
            at += len(each.positions)
        return x[:count]

    def _late(self, i: int) -> dict[Span, Late]:
        """Rows known before that run layer i now, by the span that they run with."""
        found: dict[Span, Late] = {}
        for span in self.batch.spans:
            if span.phase.late is None or (span.layers is not None and not span.layers[0] <= i < span.layers[1]):
                continue
            late = span.phase.late(i, span)
            if late is not None and len(late.positions):
                assert span.rows == 1, "rows run late with a single other one"
                found[span] = late
        return found

    def _active(self, i: int, x: Tensor, late: dict[Span, Late]) -> tuple[list[_Entry], list[int]]:
        entries: list[_Entry] = []
        index: list[int] = []
        behind = x.shape[0]  # where the next rows that run late lie
        for span in self.batch.spans:
            if span.layers is not None and not span.layers[0] <= i < span.layers[1]:
                continue
            local = None if span.phase.skip is None else span.phase.skip.rows(i, span, x[span.slice])
            ids = None if local is None else local.tolist()
            rows = range(span.rows) if ids is None else ids
            if (after := late.get(span)) is not None:
                assert len(rows), "rows run late with one that runs"
                at = slice(len(index), len(index) + len(after.positions) + 1)
                index.extend((*range(behind, behind + len(after.positions)), span.start))
                behind += len(after.positions)
                positions = [*after.positions, *span.positions]
                entries.append(_Entry(span, at, positions, [0] * len(positions), after.positions))
                continue
            if not len(rows):
                continue
            if ids is not None and len(ids) == span.rows:
                ids = None
            at = slice(len(index), len(index) + len(rows))
            index.extend(span.start + r for r in rows)
            own = span.positions if ids is None else [span.positions[r] for r in ids]
            entries.append(_Entry(span, at, own, ids))
        return entries, index


def forward(
    model: Model, spans: Sequence[Span], counters: Counters, taps: set[int] | None = None, room: Scratch | None = None
) -> Hidden:
    """Run `spans` through the model; counts forwards, and rows that enter the first layer.

    Rows are appended to the KV uncommitted; the caller commits. KV room must have been reserved. With `room`, the
    result may lie there, until the next call with it.
    """
    counters.forwards += 1
    for span in spans:
        if span.layers is None or span.layers[0] == 0:
            counters.rows += span.rows
            if span.request.prefilling:
                counters.prompt_rows += span.rows
    batch, room, taps = Batch(spans, model.device), room or Scratch(), taps or set()
    if room.kept is not None and (ends := room.kept.ends(batch, model, room.x, taps)) is not None:
        return room.kept.run(batch, ends, model, counters)
    found = lower_all(model, spans)
    fit = [each for each in found if isinstance(each, Lowered)]
    if len(fit) == len(found):
        return NativeStep(model, counters, room, taps).run(batch, fit)
    if fit:
        opened = [not isinstance(each, Lowered) for each in found]
        return _apart(batch, fit, opened, NativeStep(model, counters, room, taps))
    return OpenStep(model, batch, counters, taps).run()


def _apart(batch: Batch, lowered: Sequence[Lowered], opened: Sequence[bool], step: NativeStep) -> Hidden:
    """Spans of the open path beside native ones. In 16 bits the two ways round differently, and which way a request
    goes must not depend on its mates: so each goes its own, which takes a second forward."""
    model, counters = step.model, step.counters
    groups = [[span for span, flag in zip(batch.spans, opened) if flag is way] for way in (False, True)]
    results: list[Hidden] = []
    places: dict[int, tuple[int, slice]] = {}
    for way, spans in enumerate(groups):
        own = Batch(spans, model.device)
        results.append(step.run(own, lowered) if way == 0 else OpenStep(model, own, counters, step.taps).run())
        places |= {id(span): (way, span.slice) for span in spans}
    counters.forwards += 1
    start = 0

    def joined(of: Sequence[Tensor]) -> Tensor:
        return torch.cat([of[way][here] for way, here in (places[id(span)] for span in batch.spans)])

    out = Hidden(
        joined([result.x for result in results]), batch.rows,
        {tap: joined([result.taps[tap] for result in results]) for tap in step.taps},
    )  # fmt: skip
    for span in batch.spans:  # back in order
        span.start = start
        start += span.rows
    return out
