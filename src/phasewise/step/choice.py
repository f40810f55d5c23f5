"""How the rows of a phase choose what they read, said as data: then nobody has to be asked inside a layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from phasewise.kv.pages import By, PageTable
from phasewise.ops.native.stack import Chosen, StackSpan

if TYPE_CHECKING:
    from phasewise.kv.contiguous import ContiguousView
    from phasewise.step.span import Span


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

    def acts(self, span: Span) -> bool:
        """Whether a row of the span sees more than it may read."""
        positions = span.positions
        return (positions[-1] if isinstance(positions, range) else max(positions)) >= self.most

    def natively(self, span: Span, flat: ContiguousView, whole: StackSpan) -> StackSpan | None:
        """`whole`, which reads everything, as it is with this choice.

        None where a native step does not make it: for spans with structure or of several rows, where rows were given
        up, or where the budget has no room for page keys.
        """
        if span.rows != 1 or whole.sees is not None or flat.gaps or flat.n != span.positions[0]:
            return None
        table = self._table(flat, span.phase.walk or range(len(flat.layers)))
        if table is None:
            return None
        n = flat.n + 1
        pages = flat.n // self.page
        fit = (self.most - n + pages * self.page) // self.page
        known = table.known(pages)
        rows = fit * self.page + n - pages * self.page
        read = rows * table.row_bytes + n * (flat.row_bytes - table.row_bytes) + pages * table.page_bytes
        if known < pages:
            read += (flat.n - known * self.page) * table.key_bytes
        return whole._replace(
            choice=Chosen((pages, self.page, fit, known, table.address), read, partial(table.sealed, pages))
        )

    def _table(self, flat: ContiguousView, layers: Sequence[int]) -> PageTable | None:
        table = flat.tables.get(self)
        if table is None:
            table = PageTable.of(flat.layers, [layer < self.dense_layers for layer in layers], self.by, self.page)
            if table is not None:
                flat.tables[self] = table
        return table
