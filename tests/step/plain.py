"""A KV cache as plain lists of rows: what LayerKV is held against."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from phasewise.kv.layer_kv import LayerKV

HEADS, DIM = 3, 4


@dataclass(frozen=True)
class Row:
    """One row of one head: its true position, and a number that its key and value are made of."""

    position: int
    mark: float

    def key(self, head: int) -> list[float]:
        return [self.mark, float(head), float(self.position), 1.0]

    def value(self, head: int) -> list[float]:
        return [-self.mark, float(head), 0.5, float(self.position)]


@dataclass
class PlainLayer:
    """Committed rows per head, then the rows of the step under way with their places in the span."""

    heads: list[list[Row]] = field(default_factory=lambda: [[] for _ in range(HEADS)])
    fresh: list[tuple[int, Row]] = field(default_factory=list)
    freed: bool = False

    def commit(self, keep: int | Sequence[int]) -> None:
        wanted = range(keep) if isinstance(keep, int) else keep
        for head in self.heads:
            head.extend(row for place, row in self.fresh if place in wanted)
        self.fresh = []

    def twin(self) -> PlainLayer:
        return PlainLayer([list(head) for head in self.heads], [], self.freed)


def tensors(rows: Sequence[Row]) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [HEADS, R, DIM] of rows about to be appended."""
    k = torch.tensor([[row.key(h) for row in rows] for h in range(HEADS)]).reshape(HEADS, len(rows), DIM)
    v = torch.tensor([[row.value(h) for row in rows] for h in range(HEADS)]).reshape(HEADS, len(rows), DIM)
    return k, v


def assert_same(layer: LayerKV, plain: PlainLayer) -> None:
    """Values, positions, span rows and sizes of every head."""
    if plain.freed:
        assert layer.read() == [] and layer.bytes == 0 and layer.n == 0
        return
    met = []
    for part in layer.read():
        heads = list(range(HEADS)) if part.heads is None else part.heads.tolist()
        met += heads
        assert part.size == (len(heads), part.n + part.fresh)
        ids = list(range(part.fresh)) if part.ids is None else part.ids.tolist()
        assert ids == [place for place, _ in plain.fresh]
        every = torch.arange(part.size[1]).expand(len(heads), -1)
        taken_k, taken_v = part.take(every)
        assert torch.equal(part.keys(0, part.size[1]), part.k)
        for i, head in enumerate(heads):
            rows = plain.heads[head] + [row for _, row in plain.fresh]
            assert part.positions.expand(len(heads), -1)[i].tolist() == [row.position for row in rows]
            assert part.k[i].tolist() == taken_k[i].tolist() == [row.key(head) for row in rows]
            assert part.v[i].tolist() == taken_v[i].tolist() == [row.value(head) for row in rows]
    assert sorted(met) == list(range(HEADS))
    assert layer.n == max(len(head) for head in plain.heads)
    assert layer.live_bytes == sum(len(head) for head in plain.heads) * 2 * DIM * 4
