"""Groups the rows of a span that read packed blocks in one form, and gives what they then read (`kv/blocks.py`).

What is sealed for a row depends on how many rows it sees. A draft, or a replay after a preemption, brings rows that see
different numbers of them: each then reads what it would have read alone, of a tree what lies on its own path.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from phasewise.kv.blocks import LazyPlanes, ahead, packed
from phasewise.kv.format import SIDES
from phasewise.kv.part import KVPart
from phasewise.ops.native.stack import StackSpan
from phasewise.step.span import Span

if TYPE_CHECKING:
    from phasewise.kv.blocks import LayerBlocks
    from phasewise.kv.contiguous import ContiguousView
    from phasewise.kv.format import BlockCut
    from phasewise.kv.layer_kv import LayerKV


@dataclass(frozen=True, slots=True)
class Group:
    """Local `rows` int64 [r] of a span, as a `span` of their own, for which the first `upto` [keys, values] of what
    they see are sealed: committed rows, and then as many of the step's own as that takes, `path`."""

    rows: Tensor
    span: Span
    upto: tuple[int, int]
    path: Sequence[int]


def groups(span: Span, cache: LayerKV) -> list[Group]:
    """The rows of a span by form; the span itself where they have one. Its rows are in the KV, uncommitted."""
    assert cache.blocks is not None and cache.fresh == span.first + span.rows, "all rows run this layer"
    keys, values = cache.blocks.format.cuts
    found: dict[tuple[int, int, tuple[int, ...]], list[int]] = {}
    for row, path in enumerate(_paths(span)):
        seen = cache.n + len(path)
        k, v = keys.sealed(seen), values.sealed(seen)
        found.setdefault((k, v, tuple(path[: max(0, max(k, v) - cache.n)])), []).append(row)
    now = keys.sealed(cache.n), values.sealed(cache.n), ()
    if cache.blocks.format.by_saliency and list(found) != [now]:
        assert span.phase.evict is None, "rows of a text end a step at a border"
        found = {now: list(range(span.rows))}  # a guess that runs ahead, of which nothing stays
    every = []
    for (k, v, own), rows in found.items():
        alone = span if len(found) == 1 else _part_of(span, rows)
        every.append(Group(torch.tensor(rows, device=cache.shape.device), alone, (k, v), own))
    return every


def _paths(span: Span) -> list[Sequence[int]]:
    """For each row the uncommitted rows before it that it sees. Rows of one block read what its first row reads."""
    if span.sees is None:
        return [range(span.first + row // span.block * span.block) for row in range(span.rows)]
    return [[i for i in row.nonzero().flatten().tolist() if i != span.first + at] for at, row in enumerate(span.sees)]


def _part_of(span: Span, rows: Sequence[int]) -> Span:
    """Some rows of a span, which see the same of it."""
    every = span.first + span.rows
    sees = span.seen(torch.tensor(rows), torch.arange(every))
    tokens, positions = ([of[row] for row in rows] for of in (span.tokens, span.positions))
    return replace(
        span, tokens=tokens, positions=positions, sees=sees, first=every - len(rows), block=1, hidden=None, sure=()
    )


def natively(span: Span, flat: ContiguousView, cuts: Sequence[BlockCut], whole: StackSpan) -> StackSpan | None:
    """`whole`, of a span over sealed rows, as native steps take it: row by row where it has several. None where blocks
    would hold rows of this very step."""
    if span.first or span.block > 1:
        return None
    paths = _paths(span)
    forms = [tuple(cut.sealed(flat.n + len(path)) for cut in cuts) for path in paths]
    if max(map(max, forms)) > flat.n:
        return None
    flat.ahead([max(form[side] for form in forms) for side in SIDES])
    tables = {form: flat.sides(form) for form in forms}
    size = sum(flat.reads(form, whole.n) for form in tables)
    if span.rows == 1:
        return whole._replace(sealed=tables[forms[0]], size=size)
    rows = []
    for row, form in enumerate(forms):
        sees = None if whole.sees is None else whole.sees[row : row + 1, : row + 1].contiguous()
        seats = None if whole.seats is None else whole.seats[row : row + 1]
        one = whole._replace(n=flat.n + row + 1, rows=1, sees=sees, seats=seats, sealed=tables[form])
        rows.append(one._replace(weighed=whole.weighed if row == span.rows - 1 else None))
    return whole._replace(sealed=tables[forms[0]], size=size, pieces=tuple(rows))


def parts(cache: LayerKV, found: Sequence[Group]) -> list[KVPart]:
    """One part for each group: what it reads of a layer. Blocks are opened once for all, and only where no kernel reads
    them packed."""
    (whole,), sealed = cache.read(), cache.blocks
    assert sealed is not None
    made = []
    if whole.packed is not None:
        tail, base = whole.packed.tail, whole.packed.base
        most = [max([group.upto[side] for group in found if group.upto[side] <= whole.n], default=0) for side in SIDES]
        ahead([(sealed, tail, base)], most)
    for group in found:
        after = [whole.n + fresh for fresh in group.path]
        part = replace(whole, planes=LazyPlanes(partial(_formed, sealed, whole, group, after)))
        if whole.packed is not None:
            part.packed = packed(sealed, tail, base, whole.n, group.upto, after)
        part.bytes = sealed.read_bytes(group.upto, whole.size[1])
        made.append(part)
    return made


def _formed(sealed: LayerBlocks, whole: KVPart, group: Group, after: Sequence[int]) -> list[Tensor]:
    """Keys and values as a group reads them, opened."""
    return [sealed.formed(side, whole.planes[side], group.upto[side], whole.n, after) for side in SIDES]
