"""Requests of a tiny model in bfloat16 whose prompts are computed: what rows of a draft leave, to the bit, beside other
rows that are to change nothing."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from phasewise import catalog
from phasewise.engine.assembly import kv_shapes
from phasewise.kv.buffer import Ledger
from phasewise.kv.format import Raw
from phasewise.kv.store import Store
from phasewise.model.lowrank import Delta
from phasewise.model.model import Model
from phasewise.request.counters import Counters
from phasewise.request.request import Request
from phasewise.speculation.loop import Speculation, draft_span
from phasewise.step.forward import forward
from phasewise.step.phase import Phase
from phasewise.step.span import Span
from phasewise.verbs.draft import Draft
from tests import tiny

WIDTH = 64
TREE = Draft([7, 30, 12, 50, 9], [-1, -1, 0, 0, 1])
CHAIN = Draft([7, 30], [-1, 0])
DENSE = Phase("decode", None, catalog.build("attend", "dense"))  # type: ignore[arg-type]


@cache
def half() -> Model:
    return Model.load(tiny.checkpoint(hidden=WIDTH), dtype=torch.bfloat16)


class Begun:
    """A request whose prompt is computed but for the pending token; `lora`: its adapter."""

    def __init__(self, prompt: Sequence[int], lora: Delta | None = None) -> None:
        self.counters = Counters()
        store = Store(kv_shapes(half()), Raw(), ledger=Ledger(64 << 20), counters=self.counters)
        self.request = Request(prompt, tiny.greedy(40))
        self.request.lora = lora
        self.kv = self.request.kv = store.open(self.request, len(prompt) + 64)
        self.kv.reserve(len(prompt) + 64)
        n = len(prompt) - 1
        forward(half(), [Span(self.request, self.kv, DENSE, prompt[:n], range(n))], self.counters)
        self.kv.commit(n)
        self.request.computed = n

    def plain(self) -> Span:
        """The span of its pending token."""
        n = self.kv.layers[0].n
        return Span(self.request, self.kv, DENSE, self.request.tokens[-1:], range(n, n + 1))

    def with_given(self, draft: Draft, each: Sequence[int], tuned: Delta | None = None) -> Span:
        """The span of a draft with so many given rows behind the pending token and each node, as the loop makes it.
        `tuned`: low-rank weights of these rows."""
        whole, rows = Draft([*draft.tokens], [*draft.parents], tuned=tuned), list[torch.Tensor]()
        embeddings = torch.randn(max(each, default=0), WIDTH, generator=torch.Generator().manual_seed(0))
        for node, count in enumerate(each, -1):
            above = node
            for i in range(count):
                above = whole.add(above, 0)
                whole.ask += 1
                rows.append(embeddings[i])
        if rows:
            whole.given = torch.stack(rows)
        made: Any = type("Loop", (), {"host": type("Host", (), {"model": half()})})
        return Speculation._entering(made, draft_span(self.request, whole, DENSE), whole)

    def run(self, span: Span, others: Sequence[Begun], kept: Sequence[int] | int) -> Passed:
        """One pass of this request's span between plain ones of others; then the rows `kept` of its draft stay."""
        spans = [each.plain() for each in others]
        x = forward(half(), [*spans[:1], span, *spans[1:]], self.counters).x
        rows = x[span.slice].clone()
        self.kv.commit(kept)
        slabs = [slab for layer in self.kv.layers for slab in layer.slabs]
        planes = [plane[:, : slab.n].clone() for slab in slabs for plane in slab.buffer.planes]
        assert len({layer.n for layer in self.kv.layers}) == 1
        return Passed(rows, planes)


class Passed:
    """rows [n, d] after the last layer, and the planes of KV that stays."""

    def __init__(self, rows: torch.Tensor, planes: Sequence[torch.Tensor]) -> None:
        self.rows, self.planes = rows, planes

    def same_rows(self, other: Passed, n: int) -> bool:
        """Whether the first n rows are the same, to the bit."""
        return torch.equal(self.rows[:n], other.rows[:n])

    def same_kv(self, other: Passed) -> bool:
        return all(torch.equal(a, b) for a, b in zip(self.planes, other.planes, strict=True))
