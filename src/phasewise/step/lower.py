"""Turns the plan of a span into what the kernels take: the one place that knows their structures.

A span that has a lowered form is computed by a native step; the others run operator by operator, as the open path of
`forward` does. tests/ops/test_native_stack.py holds the two together.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from phasewise.kv.unequal import Narrow, by_head
from phasewise.ops.native.stack import Stack, StackSpan
from phasewise.ops.native.weighed import MOST_SHARING, Weighs
from phasewise.step import forms
from phasewise.step.choice import simple
from phasewise.step.plan import EVERYTHING, FULL, AttentionPlan, Custom, Window

if TYPE_CHECKING:
    from phasewise.kv.contiguous import ContiguousView
    from phasewise.model.model import Model
    from phasewise.step.span import Span


class Lowered(NamedTuple):
    """A span as native steps take it. `by_layer` says why its plan is executed layer by layer, between queries and
    attention; "": the kernels do all of it."""

    part: StackSpan
    by_layer: str = ""


class Unlowered(NamedTuple):
    """A span that runs operator by operator, because `why`."""

    why: str


def windows_of(model: Model) -> list[int]:
    """The sizes of the model's own attention windows."""
    if model.stack is None or not model.stack.windowed:
        return []
    return [spec.window for spec in model.config.attention if spec.window is not None]


def lower_all(model: Model, spans: Sequence[Span]) -> list[Lowered | Unlowered]:
    """The lowered forms of a step's spans."""
    stack = model.stack
    if stack is None:
        return [Unlowered("the model has no native step")] * len(spans)
    windows = windows_of(model)
    found = [lower(span, stack, windows) for span in spans]
    for span, each in zip(spans, found):
        if span.first and isinstance(each, Unlowered):
            span.kv.spread()
    return found


def lower(span: Span, stack: Stack, windows: Sequence[int]) -> Lowered | Unlowered:
    """The lowered form of a span, which depends on its plan and its KV alone, never on the step's other spans."""
    flat = _layout(span, stack)
    if isinstance(flat, Unlowered):
        return flat
    whole = _everything(span, flat, windows)
    if isinstance(whole, Unlowered):
        return whole
    hidden = any(window < whole.n for window in windows)  # some layer's own window may hide rows
    plan = span.plan
    if plan is EVERYTHING and flat.cuts is None:
        return Lowered(whole)
    if plan.record is not None and plan.reads_all and span.phase.skip is None and not hidden:
        whole = whole._replace(weighed=_weighed(span, flat, stack, 1 if flat.cuts is None else span.rows))
    if plan.bias is not None:
        whole = _biased(plan, span, flat, whole)
    if flat.cuts is not None:
        return _sealed(span, flat, whole)
    if whole.weighed is not None:
        return Lowered(whole)
    if plan.window is not None and plan.window.hides(span):
        return _windowed(span, flat, whole, stack, windows)
    return _chosen(span, flat, whole, stack, hidden)


# ---- where the rows lie
def _layout(span: Span, stack: Stack) -> ContiguousView | Unlowered:
    """The span's KV in all layers that it runs, or why no kernel reads it."""
    phase = span.phase
    if not phase.walks:
        return Unlowered("which rows run a layer is decided on the way")
    if span.layers is not None and (phase.walk is not None or span.plan.acts_by_layer):
        return Unlowered("a part of the depth runs, where a method acts")
    if span.first and (span.plan.acts_by_layer or any(layer.fresh for layer in span.kv.layers)):
        return Unlowered("a tree comes in pieces, where a method acts or other paths have computed some of it")
    flat = span.kv.flat(span.walk)
    if flat is None or (flat.unequal is not None and stack.reading < stack.count):
        return Unlowered("rows do not lie alike in all layers")
    return flat


def _everything(span: Span, flat: ContiguousView, windows: Sequence[int]) -> StackSpan | Unlowered:
    """The span's rows reading everything before them, or why kernels cannot do that."""
    phase, sees = span.phase, span.sees
    tuned = None if phase.delta is None else phase.delta.table(span.walk or range(len(flat.layers)))
    if phase.delta is not None and tuned is None:
        return Unlowered("low-rank weights are no table of the kernels")
    seats = None
    if windows:  # they are counted in positions, where slots are meant
        uneven = flat.gaps and (span.first > 0 or flat.unequal is not None)
        if span.positions[0] > flat.n + span.first or uneven:
            return Unlowered("rows were given up under a window of the model's own")
        if sees is not None:  # of a tree, own slots are others than positions: no window may end among them
            seats = array("q", span.positions)
            if max(seats) - flat.n >= min(windows):
                return Unlowered("a draft tree is deeper than a window of the model's own")
    own = None if sees is None else sees.contiguous()
    end = flat.n + span.first + span.rows
    whole = StackSpan(end, span.rows, own, flat.address, seats=seats, block=span.block)
    if tuned is not None:
        whole = whole._replace(tuned=tuned.address)
    if flat.unequal is not None:
        whole = whole._replace(planes=0, unequal=flat.unequal.address, missing=flat.unequal.missing)
    return whole


def _sealed(span: Span, flat: ContiguousView, whole: StackSpan) -> Lowered | Unlowered:
    """Over blocks of rows that lie packed."""
    plan = span.plan
    if whole.weighed is None and not whole.bias and (not plan.reads_all or plan.record is not None):
        return Unlowered("a method acts over packed blocks")
    assert flat.cuts is not None
    part = forms.natively(span, flat, flat.cuts, whole)
    return Unlowered("blocks would hold rows of this very step") if part is None else Lowered(part)


# ---- attention weights
def _weighed(span: Span, flat: ContiguousView, stack: Stack, most: int) -> Weighs | None:
    """How a native step finds what the last row of a span attends to, if its plan asks for nothing else."""
    heads_q, heads, _ = stack.heads
    record = span.plan.record
    if span.rows > most or span.sees is not None or record is None or record.weigh is None:
        return None
    found = record.weigh(span) if heads_q <= MOST_SHARING * heads else None
    if found is None or found.n != flat.n + span.rows - 1 or any(found.room.begins) != (flat.unequal is not None):
        return None
    found.room.temper(found.doubt, span.positions[-1], 0 if found.doubt is None else flat.places)
    return found


# ---- a number added to the score of the first token
def _biased(plan: AttentionPlan, span: Span, flat: ContiguousView, whole: StackSpan) -> StackSpan:
    """`whole` with the plan's bias on slot 0; or as it is, where kernels do not add it: beside an evict method that
    acts by layer, or where heads or layers keep unequally many rows."""
    assert plan.bias is not None
    by_head = plan.window is not None and plan.window.heads is not None and plan.window.hides(span)
    if plan.record is not None or by_head or flat.unequal is not None:
        return whole
    if flat.gaps and (flat.cuts is not None or not flat.n):
        return whole
    table = flat.biases.get(plan.bias)
    if table is None:
        table = flat.biases[plan.bias] = _bias_table(plan.bias, flat, span.walk)
    return whole._replace(bias=table.data_ptr())


def _bias_table(bias: Tensor, flat: ContiguousView, walk: Sequence[int] | None) -> Tensor:
    """Of the layers that run, 0 where slot 0 is another position's: float32 [layers, Hq]."""
    added = bias if walk is None else bias[list(walk)]
    if not flat.gaps:
        return added.contiguous()
    held = added.new_ones((len(flat.layers), flat.layers[0].shape.heads), dtype=torch.bool)
    for row, layer in zip(held, flat.layers):
        (slab,) = layer.slabs
        if slab.positions is not None:
            row &= slab.positions[:, 0] == 0
    return added * held.repeat_interleave(added.shape[1] // held.shape[1], 1)


# ---- attention windows
def _windowed(
    span: Span, flat: ContiguousView, whole: StackSpan, stack: Stack, own: Sequence[int]
) -> Lowered | Unlowered:  # fmt: skip
    """With an attention window that hides something; `own`: the sizes of the model's own."""
    plan, window = span.plan, span.plan.window
    assert window is not None
    if window.heads is None:
        if own:
            return Unlowered("an attention window beside the model's own")
        part = _through(window, span, flat, whole)
        if part is None:
            return Unlowered("slots do not tell what the attention window hides")
        unasked = plan.keys is FULL and (plan.bias is None or part.bias)
        return Lowered(part, "" if unasked else "rows choose within an attention window")
    if plan.reads_all and stack.reading == stack.count and not any(each < whole.n for each in own):
        part = _through(window, span, flat, whole)
        if part is not None:
            return Lowered(part)
    return Lowered(whole, "an attention window of some heads, which slots do not tell")


def seen_slots(window: Window, span: Span, flat: ContiguousView) -> Narrow | None:
    """The slots that a window shows to rows, as so many first and last ones. None where slots do not tell what is seen:
    the cached rows are others than those seen for good and then consecutive positions."""
    first = span.positions[0]
    if span.first or not (window.prompts or first >= span.request.prompt_len):
        return None
    heads = window.heads if window.heads is None or span.walk is None else tuple(window.heads[i] for i in span.walk)
    if window.stride:
        front, until = _front(window, flat, heads, first)
        return Narrow(front, window.size, heads) if span.last < until else None
    narrow = Narrow(window.sinks, window.size, heads)
    uneven = heads is None and flat.unequal is not None
    return None if uneven or not flat.lined(narrow, first) else narrow


def _through(window: Window, span: Span, flat: ContiguousView, whole: StackSpan) -> StackSpan | None:
    """`whole`, which sees everything, as it is through a window; `near` is still a position, no place in the turns.

    None where slots do not tell what is seen, or the span's own rows lie further apart than the window reaches.
    """
    narrow = seen_slots(window, span, flat)
    if narrow is None:
        return None
    first = span.positions[0]
    lost, seats = first - flat.n, None  # a row's position is that much larger than its slot
    if span.sees is not None:
        seats = array("q", (position - lost for position in span.positions))
        if max(seats) - min(seats) >= narrow.window:
            return None
    elif span.positions[-1] - first != span.rows - 1:
        return None
    if narrow.heads is not None:
        lies = flat.narrowed(narrow)
        missing = lies.missing + lies.unseen(flat.n + 1 - narrow.window)
        return whole._replace(planes=0, unequal=lies.address, missing=missing, seats=seats, narrow=True)
    near = narrow.sinks + narrow.window - 1 if window.rebased and narrow.sinks else -1
    beyond = max(0, narrow.sinks + narrow.window - lost)
    return whole._replace(window=narrow.window, sinks=narrow.sinks, near=near, beyond=beyond, seats=seats)


def _front(
    window: Window, flat: ContiguousView, heads: tuple[tuple[bool, ...], ...] | None, position: int
) -> tuple[int, int]:  # fmt: skip
    """How many of the first slots a row at `position`, behind all that are committed, sees for good under a window with
    a stride; and the first position that does not see just those and the window. (0, 0): rows lie otherwise.

    Rows that stay lie in front, then those that have left the window and wait to be dropped, then the window.
    """
    lost = window, position - flat.n
    known = flat.front
    if known is None or known[0] != lost or position >= known[2]:
        known = flat.front = (lost, *_found(window, flat, heads, position))
    return known[1:]


def _found(
    window: Window, flat: ContiguousView, heads: tuple[tuple[bool, ...], ...] | None, position: int
) -> tuple[int, int]:  # fmt: skip
    held: Tensor | None = None
    for i, layer in enumerate(flat.layers):
        for head, (slab, place) in enumerate(by_head(layer)):
            if heads is not None and not heads[i][head]:
                continue
            at = slab.positions
            rows = torch.arange(slab.n) if at is None else at[min(place, slab.said - 1), : slab.n]
            if slab.base or not (held is None or torch.equal(held, rows)):
                return 0, 0
            held = rows
    if held is None:
        return 0, 0
    n, stays = len(held), window.stays(held)
    front = n if bool(stays.all()) else int(stays.to(torch.uint8).argmin())
    if not torch.equal(held[front:], torch.arange(position - n + front, position)):
        return 0, 0
    behind = position if front == n else int(held[front])  # what comes after those in front
    return front, window.staying(behind) + window.size


# ---- top-k KV selection
def _chosen(span: Span, flat: ContiguousView, whole: StackSpan, stack: Stack, hidden: bool) -> Lowered:
    """Without an attention window that hides anything: what rows choose, where kernels make that choice."""
    plan = span.plan
    if plan.record is not None:
        return Lowered(whole, "attention weights are taken by layer")
    if plan.bias is not None and not whole.bias:
        return Lowered(whole, "a bias where heads keep unequally many rows")
    if not isinstance(plan.keys, Custom):
        return Lowered(whole)
    choice = plan.keys.choice
    if choice is None:
        return Lowered(whole, "a function chooses what rows read")
    if stack.capped or hidden:
        return Lowered(whole, "rows choose under a cap of scores or a window of the model's own")
    if not simple(span, flat, whole):
        return Lowered(whole, "several rows choose, or over KV with gaps")
    part = choice.natively(span, flat, whole)
    return Lowered(whole, "kernels do not make this choice") if part is None else Lowered(part)
