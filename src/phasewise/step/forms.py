"""Which rows of a span read sealed blocks in one form, and what they then read (`kv/blocks.py`).

What is sealed for a row depends on how many rows it sees. A draft, or a replay after a preemption, brings rows that see
different numbers of them: each then reads what it would have read alone, of a tree what lies on its own path.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from phasewise.kv.blocks import marking
from phasewise.kv.part import Part
from phasewise.step.span import Span

if TYPE_CHECKING:
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
    assert cache.sealed is not None and cache.fresh == span.first + span.rows, "all rows run this layer"
    keys, values = cache.sealed.codec.cuts
    found: dict[tuple[int, int, tuple[int, ...]], list[int]] = {}
    for row, path in enumerate(_paths(span)):
        seen = cache.n + len(path)
        k, v = keys.sealed(seen), values.sealed(seen)
        found.setdefault((k, v, tuple(path[: max(0, max(k, v) - cache.n)])), []).append(row)
    now = keys.sealed(cache.n), values.sealed(cache.n), ()
    if marking(cache.codec) is not None and list(found) != [now]:
        assert span.phase.evict is None, "rows of a text end a step at a border"
        found = {now: list(range(span.rows))}  # a guess that runs ahead, of which nothing stays
    every = []
    for (k, v, own), rows in found.items():
        alone = span if len(found) == 1 else _part_of(span, rows)
        every.append(Group(torch.tensor(rows, device=cache.shape.device), alone, (k, v), own))
    return every


def _paths(span: Span) -> list[Sequence[int]]:
    """Of each row, the uncommitted rows before it that it sees; rows of one block read what its first row reads."""
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


def parts(cache: LayerKV, found: Sequence[Group]) -> list[Part]:
    """What each group reads of a layer. Blocks are opened once for all."""
    (whole,), sealed = cache.read(), cache.sealed
    assert sealed is not None
    made = []
    for group in found:
        after = [whole.n + fresh for fresh in group.path]
        planes = [sealed.formed(side, whole.planes[side], group.upto[side], whole.n, after) for side in (0, 1)]
        part = replace(whole, planes=planes)
        part.bytes = sealed.read_bytes(group.upto, whole.size[1])
        made.append(part)
    return made
