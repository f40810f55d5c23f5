"""Lists that layers take over from each other, or steps from earlier ones, said as data (see step/choice.py)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from phasewise.ops.native.abi import LayerChoiceStruct, Structures
from phasewise.ops.native.choice import AGAIN, ALL, GIVEN, PEAK, PICKS, SHARE, Candidates, Chosen, Ways
from phasewise.ops.native.stack import StackSpan

if TYPE_CHECKING:
    from phasewise.kv.contiguous import ContiguousView
    from phasewise.step.span import Span


@dataclass(frozen=True, eq=False)
class PickedChoice:
    """Layers before the first of `picking` read everything; these do too, and pick for every KV head the `k` rows
    before the own one with the largest weight (over the query heads that share it); a layer behind reads what was
    picked last, and the own row."""

    k: int
    picking: Collection[int]

    def natively(self, span: Span, flat: ContiguousView, whole: StackSpan) -> StackSpan | None:
        n, layers = flat.n + 1, span.phase.walk or range(len(flat.layers))
        ways = self._ways(layers)
        candidates = Candidates(0, n - 1, 1, self.k, PEAK, False, 0, n, width=flat.layers[0].shape.dim)
        row, picks, less = flat.row_bytes // len(layers), ways.count(PICKS), ways.count(AGAIN)
        read = (len(layers) - less) * n * row + picks * n * row // 2 + less * candidates.listed(n) * row
        structs = Structures(LayerChoiceStruct, [LayerChoiceStruct(way=way) for way in ways])
        lists = torch.empty((flat.layers[0].shape.heads, candidates.listed(n)), dtype=torch.int32)
        handed = Ways(structs, lists=lists)
        return whole._replace(choice=Chosen(candidates, n, handed, read))

    def _ways(self, layers: Sequence[int]) -> list[int]:
        ways, found = list[int](), False
        for layer in layers:
            picks = layer in self.picking
            ways.append(PICKS if picks else AGAIN if found else ALL)
            found = found or picks
        return ways


class Given(NamedTuple):
    """What the row of a span reads: of every layer the slots `lists` int32 [H, K] (-1: none), and all from `own` on."""

    lists: Sequence[Tensor]
    own: int


@dataclass(frozen=True, eq=False)
class GivenChoice:
    """Rows read what was chosen in an earlier step. `given(span)`: what that is; None: the method has to be asked. It
    hears the queries of every layer after the step, `heard(span, queries)`, bfloat16 [layers, Hq, D]."""

    given: Callable[[Span], Given | None]
    heard: Callable[[Span, Tensor], None]
    heads: int  # of queries

    def natively(self, span: Span, flat: ContiguousView, whole: StackSpan) -> StackSpan | None:
        """None where layers are passed by."""
        given = self.given(span) if span.phase.walk is None else None
        if given is None:
            return None
        n, shape = flat.n + 1, flat.layers[0].shape
        queries = torch.empty((len(flat.layers), self.heads, shape.dim), dtype=torch.bfloat16)
        candidates = Candidates(0, given.own, 1, given.lists[0].shape[1], SHARE, False, 0, 0)
        structs = Structures(LayerChoiceStruct, [LayerChoiceStruct(way=GIVEN, low=each) for each in given.lists])
        read, done = candidates.listed(n) * flat.row_bytes, partial(self.heard, span, queries)
        ways = Ways(structs, queries)
        return whole._replace(choice=Chosen(candidates, 0, ways, read, done))
