"""How the rows of a phase choose what they read, said as data: then nobody has to be asked inside a layer."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from phasewise.kv.pages import By, PageKeys
from phasewise.kv.vectors import Kept, Standing, VectorTable
from phasewise.ops.native.choice import PROMISE, Ballot, Candidates, Chosen, Rest, Ways
from phasewise.ops.native.stack import StackSpan

if TYPE_CHECKING:
    from phasewise.kv.contiguous import ContiguousView
    from phasewise.kv.layer_kv import LayerKV
    from phasewise.step.read import Read
    from phasewise.step.span import Span


class Choice(Protocol):
    """What a whole step has to know of rows that choose."""

    def natively(self, span: Span, flat: ContiguousView, whole: StackSpan) -> StackSpan | None:
        """`whole`, one `simple` row that reads everything, as it is with this choice; None where a native step does not
        make it."""
        ...


def simple(span: Span, flat: ContiguousView, whole: StackSpan) -> bool:
    """Whether it is one row that sees all before it, none missing, in slots of their positions."""
    plain = span.rows == 1 and whole.sees is None and flat.unequal is None
    return plain and not flat.gaps and flat.n == span.positions[0]


@dataclass(frozen=True, slots=True)
class PageChoice:
    """A row reads the rest of its own page of `page` positions, and whole pages before it: those that promise its
    queries the most (largest over the query heads that share a KV head; of equal ones the earlier), as many as fit into
    `most` rows in all, which is at least `page`.

    A page promises what no key within its `bounds` exceeds, or what the mean of its keys gives. The first
    `dense_layers` layers read everything. Page keys are kept beside the rows by `PageKeys.key`.
    """

    page: int
    most: int
    dense_layers: int
    by: By = "bounds"

    def natively(self, span: Span, flat: ContiguousView, whole: StackSpan) -> StackSpan | None:
        """None where the budget has no room for page keys."""
        table = self._table(flat, span.phase.walk or range(len(flat.layers)))
        if table is None:
            return None
        n, dim = flat.n + 1, flat.layers[0].shape.dim
        pages = flat.n // self.page
        fit = (self.most - n + pages * self.page) // self.page
        candidates = Candidates(0, pages, self.page, fit, PROMISE, False, 0, pages, step=self.page, width=dim)
        known = table.known(pages)
        read = candidates.listed(n) * table.row_bytes + n * (flat.row_bytes - table.row_bytes) + pages * table.each
        if known < pages:
            read += (flat.n - known * self.page) * table.made_bytes
        ways = Ways(table.structs, kept=table)
        return whole._replace(choice=Chosen(candidates, known, ways, read, partial(table.made, pages)))

    def _table(self, flat: ContiguousView, layers: Sequence[int]) -> VectorTable | None:
        def none(i: int, keys: Tensor) -> PageKeys | None:
            return None if layers[i] < self.dense_layers else PageKeys.none(self.by, self.page, keys)

        return VectorTable.of(flat, self, PageKeys.key(self.by, self.page), none, lambda rows: rows // self.page)


@dataclass(frozen=True, eq=False)
class VectorChoice:
    """Rows choose among rows, or blocks of them, by votes for vectors that stand for keys and lie beside them by `key`.

    `candidates(n)`: of the row at slot n - 1; of width 0: that of keys. It acts on rows that see at least `least`, and
    on no layer before `dense_layers`. `lasting(n)`: how many vectors n committed rows have. `scaled`: products are
    multiplied with the scale of a layer's scores. `channels`: of every layer, int32 [H, width]: vectors are these
    numbers of keys. `make(layer, keys, start)`: vectors [H, m, width] of the keys [H, m, D] from slot `start` on, where
    kernels do not make them; it is asked for those of many rows at a time. `turned(layer, position)`: by what queries
    are turned before, cos and signed sin float32 [2, R]; None: they are not. `none`: what is kept of keys like these
    [h, 0, D], for their numbers in lines; else it is a `Kept`. `told(layers)`: after whole steps that chose in so many.
    """

    key: Hashable
    candidates: Callable[[int], Candidates]
    least: int
    lasting: Callable[[int], int]
    dense_layers: int = 0
    scaled: bool = True
    channels: Sequence[Tensor] | None = None
    make: Callable[[int, Tensor, int], Tensor] | None = None
    turned: Callable[[int, int], Tensor | None] | None = None
    none: Callable[[Tensor], Standing] | None = None
    told: Callable[[int], None] | None = None

    def acts(self, span: Span) -> bool:
        return span.last + 1 >= self.least

    def natively(self, span: Span, flat: ContiguousView, whole: StackSpan) -> StackSpan | None:
        """None where the budget has no room for vectors, or some layers know more than others."""
        layers = span.phase.walk or range(len(flat.layers))
        table = self._table(flat, layers)
        if table is None:
            return None
        n, candidates = flat.n + 1, self._among(flat.n + 1, flat.layers[0].shape.dim)
        lasting = self.lasting(flat.n)
        known = table.known(lasting)
        read = candidates.listed(n) * table.row_bytes + n * (flat.row_bytes - table.row_bytes) + table.sums
        read += (min(candidates.end, lasting) - candidates.begin) * table.each * candidates.looked // candidates.width
        if self.make is None:
            read += candidates.rows(known, lasting) * table.made_bytes
        elif known < candidates.end:
            read += (lasting - known) * table.made_bytes
            self._make(table, flat.layers, layers, lasting)
            table.made(known := lasting)
        beside = array("q", bytes(8 * len(layers) * flat.layers[0].shape.heads)) if candidates.group else None
        ways = Ways(table.structs, kept=(table, self._turn(table, layers, flat.n)), beside=beside, slot=table.slot)
        done = partial(self._done, table, lasting if self.make is None else known)
        return whole._replace(choice=Chosen(candidates, known, ways, read, done))

    def _done(self, table: VectorTable, known: int) -> None:
        table.made(known)
        if self.told is not None:
            self.told(sum(own is not None for own in table.kept))

    def _among(self, n: int, dim: int) -> Candidates:
        candidates = self.candidates(n)
        return candidates if candidates.width else candidates._replace(width=dim)

    def ballot(self, read: Read, kept: Standing) -> Ballot:
        """The same for one single row at one layer of a step in halves."""
        part, layer = read.part, read.layer
        n, rest = part.size[1], None
        struct = Ways.layer(kept.vectors, kept.sums, read.scale if self.scaled else 1.0)
        if self.channels is not None:
            channels = self.channels[layer] if part.heads is None else self.channels[layer][part.heads]
            struct.point("channels", channels)
        if self.turned is not None and (turn := self.turned(layer, n - 1)) is not None:
            struct.point("turn", turn)
            struct.turned = turn.shape[1]
        if kept.sums is not None:
            rest = Rest(kept.sums.new_empty(read.q.shape[1]), torch.empty_like(kept.sums))
        k, scale, v, v_scale = part.planes if len(part.planes) == 4 else (part.planes[0], None, part.planes[-1], None)
        among = self._among(n, read.q.shape[2])
        return Ballot(read.q, k, scale, among, kept.upto, struct, v, v_scale, rest)

    def _table(self, flat: ContiguousView, layers: Sequence[int]) -> VectorTable | None:
        def none(i: int, keys: Tensor) -> Standing | None:
            if layers[i] < self.dense_layers:
                return None
            shape = (keys.shape[0], 0, self._among(self.least, keys.shape[2]).width)
            return Kept(keys.new_empty(shape)) if self.none is None else self.none(keys)

        before = flat.tables.get(self)
        table = VectorTable.of(flat, self, self.key, none, self.lasting, 0.0 if self.scaled else 1.0)
        if table is not None and table is not before and self.channels is not None:
            for at, layer in enumerate(layers):
                table.structs.point(at, "channels", self.channels[layer])
        return table

    def _make(self, table: VectorTable, rows: Sequence[LayerKV], layers: Sequence[int], upto: int) -> None:
        assert self.make is not None
        for own, cache, layer in zip(table.kept, rows, layers):
            if isinstance(own, Kept) and own.upto < upto:
                own.add(self.make(layer, cache.read()[0].keys(own.upto, upto), own.upto))

    def _turn(self, table: VectorTable, layers: Sequence[int], position: int) -> list[Tensor]:
        """By what the queries at a position are turned, into the table."""
        if self.turned is None:
            return []
        found = [self.turned(layer, position) for layer in layers]
        for at, turn in enumerate(found):
            if turn is not None:
                struct = table.structs[at]
                struct.turn, struct.turned = turn.data_ptr(), turn.shape[1]
        return [turn for turn in found if turn is not None]
