"""Native steps in halves of layers: plans that kernels do not take are executed between queries and attention.

All rows of a step go through the halves together, so weights are read once; the other spans have the attention that a
whole step would give them, bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from phasewise.ops.native.stack import Halves
from phasewise.step import reference
from phasewise.step.inside import Inside
from phasewise.step.plan import AttentionPlan
from phasewise.step.read import Read
from phasewise.step.reads import answered, put, queries_of

if TYPE_CHECKING:
    from phasewise.model.model import Model
    from phasewise.request.counters import Counters
    from phasewise.step.batch import Batch
    from phasewise.step.span import Span

Group = tuple[AttentionPlan, list[int]]  # spans of one plan, by number


def run_halves(
    model: Model, batch: Batch, halves: Halves, by_layer: Sequence[int], counters: Counters, taps: set[int]
) -> dict[int, Tensor]:
    """Run all layers of the spans' walk; the plans of spans `by_layer` are executed in each. -> the rows after every
    layer of `taps`"""
    walk = batch.spans[0].walk
    layers = range(model.config.layers) if walk is None else walk
    inside, groups, kept = Inside(model, counters), _groups(batch, by_layer), dict[int, Tensor]()
    early = [tap for tap in taps if tap < layers[0]]
    if early or any(span.hidden is not None for span in batch.spans):
        halves.enter(_entering(model, batch))
        kept = {tap: halves.x.clone() for tap in early}
    for at, layer in enumerate(layers):
        if by_layer:
            halves.upto(2 * at + 1)
            inside.x = halves.x
            for i in _look(batch, groups, layer, inside, halves):
                halves.done(i)
        after = layers[at + 1] if at + 1 < len(layers) else model.config.layers
        tapped = [tap for tap in taps if layer <= tap < after]
        if tapped:
            halves.upto(2 * at + 2)
            kept |= {tap: halves.x.clone() for tap in tapped}
    halves.upto(2 * len(layers))
    return kept


def _entering(model: Model, batch: Batch) -> Tensor:
    """The input of the first layer, [T, d]: embedded tokens, or what a span brings instead."""
    x = model.embed(batch.tokens)
    for span in batch.spans:
        if span.hidden is not None:
            x[span.slice] = span.hidden
    return x


def _groups(batch: Batch, by_layer: Sequence[int]) -> list[Group]:
    groups: dict[int, Group] = {}
    for i in by_layer:
        plan = batch.spans[i].plan
        groups.setdefault(id(plan), (plan, []))[1].append(i)
    return list(groups.values())


def _look(batch: Batch, groups: Sequence[Group], layer: int, inside: Inside, halves: Halves) -> list[int]:
    """Execute the plans at one layer. -> the spans whose rows have been read; the others' attention is still to come"""
    queries, out = halves.between
    done: list[int] = []
    for plan, members in groups:
        asked = dict[int, list[Read]]()
        for i in members:
            reads = _reads(batch.spans[i], layer, inside, queries)
            for read in reads:
                reference.look(plan, read)
            if plan.reads_all and not any(_own(read) for read in reads):
                _count(reads)
            else:
                asked[i] = reads
        every = [read for reads in asked.values() for read in reads]
        answers = iter(reference.attend(plan, every) if every else ())
        for i, reads in asked.items():
            mine = [next(answers) for _ in reads]
            if not any(answer is not None or _own(read) for read, answer in zip(reads, mine)):
                _count(reads)
                continue
            for read, result in zip(reads, answered(reads, mine)):
                put(out, read, result, batch.spans[i].kv.layers[layer].shape.heads)
            done.append(i)
    return done


def _reads(span: Span, layer: int, inside: Inside, queries: Tensor) -> list[Read]:
    """A span's reads at a layer, head group by head group (usually one)."""
    cache, reads = span.kv.layers[layer], list[Read]()
    for part in cache.read(span.positions):
        read = Read(inside, layer, span, queries_of(part, queries[span.slice], cache.shape.heads), part)
        read.at = span.slice
        reads.append(read)
    return reads


def _own(read: Read) -> bool:
    """True if the attention still to come would not do: rows see otherwise, or it is there already."""
    return read.view is not None or read.answer is not None


def _count(reads: Sequence[Read]) -> None:
    """Count what a span reads whose attention is still to come."""
    for read in reads:
        read.count(read.part.size[1])
