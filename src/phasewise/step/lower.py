"""Turns the plan of a span into what the kernels take: the one place that knows their structures.

A span that has a lowered form is computed by a native step; the others run operator by operator, as the open path of
`forward` does. tests/ops/test_native_stack.py holds the two together.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from sys import maxsize
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from phasewise.kv.unequal import Narrow, by_head
from phasewise.kv.vectors import Kept, VectorTable
from phasewise.ops.native import listed
from phasewise.ops.native.abi import LayerChoiceStruct, Structures
from phasewise.ops.native.choice import (
    AGAIN,
    ALL,
    GIVEN,
    PEAK,
    PICKS,
    PROMISE,
    SHARE,
    Ballot,
    Candidates,
    Chosen,
    UnlistedRest,
    Ways,
    takes,
)
from phasewise.ops.native.choice import choose as choose_slots
from phasewise.ops.native.stack import Stack, StackSpan
from phasewise.ops.native.weighed import MOST_SHARING, Weighs
from phasewise.step import forms
from phasewise.step.plan import (
    EVERYTHING,
    FULL,
    AttentionPlan,
    KernelScores,
    LayerPicks,
    NamedSlots,
    ReadBlocks,
    TopK,
    Window,
)

if TYPE_CHECKING:
    from phasewise.kv.contiguous import ContiguousView
    from phasewise.kv.layer_kv import LayerKV
    from phasewise.kv.vectors import Standing
    from phasewise.model.lowrank import Delta
    from phasewise.model.model import Model
    from phasewise.step.read import Read
    from phasewise.step.span import Span


class Lowered(NamedTuple):
    """A span as native steps take it. `by_layer` says why its plan is executed layer by layer, between queries and
    attention; "": the kernels do all of it. `form`: what is kept of a single row for those after it."""

    part: StackSpan
    by_layer: str = ""
    form: KeptForm | None = None


class Unlowered(NamedTuple):
    """A span that runs operator by operator, because `why`."""

    why: str


class KeptForm:
    """The lowered form of a request's single row, which serves its later ones: another row differs in `n` alone.

    It lies with the layout of the request's KV (`ContiguousView.lowered`), which is another object as soon as buffers
    grow or move, or rows are given up, rolled back, packed or loaded. `serves` holds the rest: the plan, the phase, the
    prefix nodes, and that the row follows the committed ones as the first one did. A window that begins to hide rows
    ends it at position `until`.
    """

    __slots__ = ("__weakref__", "_block", "_lost", "_lowered", "_nodes", "_phase", "_plan", "_until", "_walk", "part")

    def __init__(self, span: Span, flat: ContiguousView, lowered: Lowered, until: int) -> None:
        self._plan, self._phase, self._block, self._nodes = span.plan, span.phase, span.block, span.kv.nodes
        self._walk = span.walk
        self._lost, self._until, self._lowered, self.part = span.last - flat.n, until, lowered, lowered.part

    def serves(self, span: Span, flat: ContiguousView) -> bool:
        """True if it is the form of this span, of which `flat`, with this form, is the KV's layout."""
        at = span.last
        return (
            at < self._until
            and at - flat.n == self._lost
            and span.phase is self._phase
            and span.single
            and span.plan is self._plan
            and span.block == self._block
            and span.kv.nodes is self._nodes
            and span.walk == self._walk
        )

    def lowered(self, n: int) -> Lowered:
        """The form of the row at slot n - 1."""
        return Lowered(StackSpan(n, *self.part[1:]), self._lowered.by_layer, self)


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
    form: KeptForm | None = flat.lowered
    if form is not None and form.serves(span, flat):
        return form.lowered(flat.n + 1)
    found = _lower(span, flat, stack, windows)
    until = _until(span, flat, found)
    if isinstance(found, Lowered) and span.last < until:
        form = flat.lowered = KeptForm(span, flat, found, until)
        return found._replace(form=form)
    return found


def _until(span: Span, flat: ContiguousView, found: Lowered | Unlowered) -> int:
    """The position below which the form of a span serves later rows of the same plan; 0: it serves no other."""
    plan = span.plan
    if isinstance(found, Unlowered) or not span.single or not flat.n or flat.cuts is not None:
        return 0
    if plan.keys is not FULL or plan.record is not None:
        return 0
    if plan.window is None:
        return maxsize
    if not plan.window.hides(span):
        return plan.window.hides_from(span)
    return maxsize if found.part.window and not plan.window.stride else 0


def _lower(span: Span, flat: ContiguousView, stack: Stack, windows: Sequence[int]) -> Lowered | Unlowered:
    whole = _everything(span, flat, stack, windows)
    if isinstance(whole, Unlowered):
        return whole
    plan = span.plan
    if plan is EVERYTHING and flat.cuts is None:
        return Lowered(whole)
    hidden = bool(windows) and min(windows) < whole.n  # some layer's own window may hide rows
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
    if not span.walks:
        return Unlowered("which rows run a layer is decided on the way")
    if span.layers is not None and (phase.skip is not None or span.plan.acts_by_layer):
        return Unlowered("a part of the depth runs, where a method acts")
    if span.first and (span.plan.acts_by_layer or any(layer.fresh for layer in span.kv.layers)):
        return Unlowered("a tree comes in pieces, where a method acts or other paths have computed some of it")
    flat = span.kv.flat(span.walk)
    if flat is None or (flat.unequal is not None and stack.reading < stack.count):
        return Unlowered("rows do not lie alike in all layers")
    return flat


def _everything(span: Span, flat: ContiguousView, stack: Stack, windows: Sequence[int]) -> StackSpan | Unlowered:
    """The span's rows reading everything before them, or why kernels cannot do that."""
    sees = span.sees
    tuned, gated = (_low_rank(delta, span, flat, stack) for delta in (span.delta, span.tuned))
    if tuned is None or gated is None:
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
    if tuned or gated:
        whole = whole._replace(tuned=tuned, gated=gated, gated_rows=span.rows - span.untuned if gated else 0)
    if flat.shared_slots:
        whole = whole._replace(shared=flat.shared.address, shared_slots=flat.shared_slots)
    if flat.unequal is not None:
        whole = whole._replace(planes=0, unequal=flat.unequal.address, missing=flat.unequal.missing)
    return whole


def _low_rank(delta: Delta | None, span: Span, flat: ContiguousView, stack: Stack) -> int | None:
    """The address of low-rank weights as the kernels take them; 0: there are none. None: they are not packed for it."""
    if delta is None:
        return 0
    found = delta.table(span.walk or range(len(flat.layers)), stack.beside)
    return None if found is None else found.address


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
    """The attention weights that a native step takes of a span's last row; None: none, or its plan asks for more."""
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
    """The bias of the layers that run, 0 where slot 0 is another position's: float32 [layers, Hq]."""
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
    """The number of first slots that a row at `position`, behind all that are committed, sees for good under a window
    with a stride; and the first position that does not see just those and the window. (0, 0): rows lie otherwise.

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


# ---- what rows choose
def _chosen(span: Span, flat: ContiguousView, whole: StackSpan, stack: Stack, hidden: bool) -> Lowered:
    """Without an attention window that hides anything: what rows choose, where kernels make that choice."""
    plan = span.plan
    if plan.record is not None:
        return Lowered(whole, "attention weights are taken by layer")
    if plan.bias is not None and not whole.bias:
        return Lowered(whole, "a bias where heads keep unequally many rows")
    if plan.keys is FULL:
        return Lowered(whole)
    if stack.capped or hidden:
        return Lowered(whole, "rows choose under a cap of scores or a window of the model's own")
    single = span.rows == 1 and whole.sees is None and flat.unequal is None
    if not single or flat.gaps or flat.n != span.positions[0]:
        return Lowered(whole, "several rows choose, or over KV with gaps")
    choice: Chosen | str = "a function chooses what rows read"
    if isinstance(plan.keys, TopK):
        choice = _top_k(plan.keys, span, flat)
    elif isinstance(plan.keys, ReadBlocks):
        choice = _by_position(plan.keys, span, flat)
    elif isinstance(plan.keys, LayerPicks):
        choice = _picks(plan.keys, span, flat)
    elif isinstance(plan.keys, NamedSlots):
        choice = _given(plan.keys, span, flat, stack)
    return Lowered(whole, choice) if isinstance(choice, str) else Lowered(whole._replace(choice=choice))


def candidates(keys: TopK, kernel: KernelScores, n: int, dim: int) -> Candidates:
    """The candidates of the row at slot n - 1, with keys of `dim` numbers."""
    units = keys.between(n)
    own = keys.first + units  # the first unit of those at the end that are read in any case
    begin, end = (0, kernel.vectors(n)) if kernel.every else (keys.first * kernel.each, own * kernel.each)
    rule = SHARE if kernel.softmax else PROMISE
    return Candidates(
        keys.first * keys.unit, units, keys.unit, keys.chosen(n), rule, kernel.joint, begin, end,
        at=keys.first * kernel.each, each=kernel.each, before=kernel.before, step=kernel.step, parts=kernel.parts,
        width=kernel.width or dim, largest=kernel.largest, group=keys.fetch,
    )  # fmt: skip


def _top_k(keys: TopK, span: Span, flat: ContiguousView) -> Chosen | str:
    """Top-k selection of a single row; or why kernels do not make it."""
    kernel = keys.scorer.kernel
    if kernel is None:
        return "kernels do not know these scores"
    layers = span.walk or range(len(flat.layers))
    table = _table(keys, kernel, flat, layers)
    if table is None:
        return "the budget has no room for the index, or layers know unequally much of it"
    n, shape = flat.n + 1, flat.layers[0].shape
    among, lasting = candidates(keys, kernel, n, shape.dim), kernel.vectors(flat.n)
    known = table.known(lasting)
    read = among.listed(n) * table.row_bytes + n * (flat.row_bytes - table.row_bytes) + table.sums
    read += (min(among.end, lasting) - among.begin) * table.each * among.looked // among.width
    if kernel.make is not None:
        if known < among.end:
            read += (lasting - known) * table.made_bytes
            _make(kernel.make, table, flat.layers, layers, lasting)
            table.made(known := lasting)
    elif kernel.softmax:
        read += among.rows(known, lasting) * table.made_bytes
    elif known < lasting:
        read += (flat.n - known * keys.unit) * table.made_bytes
    beside = array("q", bytes(8 * len(layers) * shape.heads)) if keys.fetch else None
    ways = Ways(table.structs, kept=(table, _turn(kernel, table, layers, flat.n)), beside=beside, slot=table.slot)
    done = partial(_top_k_done, table, lasting if kernel.make is None else known, keys, shape.heads)
    return Chosen(among, known, ways, read, done)


def _top_k_done(table: VectorTable, known: int, keys: TopK, heads: int) -> None:
    table.made(known)
    if keys.chose is not None:
        layers = sum(own is not None for own in table.kept)
        keys.chose(1, layers, layers * heads)


def _table(keys: TopK, kernel: KernelScores, flat: ContiguousView, layers: Sequence[int]) -> VectorTable | None:
    """The index of all layers; None where the budget has no room for it, or some layers know more than others."""

    def none(i: int, no_keys: Tensor) -> Standing | None:
        if layers[i] < keys.dense_layers:
            return None
        if kernel.empty is not None:
            return kernel.empty(no_keys)
        return Kept(no_keys.new_empty((no_keys.shape[0], 0, kernel.width or no_keys.shape[2])))

    before = flat.tables.get(keys)
    table = VectorTable.of(flat, keys, kernel.key, none, kernel.vectors, 0.0 if kernel.scaled else 1.0)
    if table is not None and table is not before and kernel.channels is not None:
        for at, layer in enumerate(layers):
            table.structs.point(at, "channels", kernel.channels[layer])
    return table


def _make(
    make: Callable[[int, Tensor, int], Tensor], table: VectorTable, rows: Sequence[LayerKV], layers: Sequence[int],
    upto: int,
) -> None:  # fmt: skip
    for own, cache, layer in zip(table.kept, rows, layers):
        if isinstance(own, Kept) and own.upto < upto:
            own.add(make(layer, cache.read()[0].keys(own.upto, upto), own.upto))


def _turn(kernel: KernelScores, table: VectorTable, layers: Sequence[int], position: int) -> list[Tensor]:
    """Write into the table by what the queries at a position are turned. -> the tensors that it points to"""
    if kernel.turned is None:
        return []
    found = [kernel.turned(layer, position) for layer in layers]
    for at, turn in enumerate(found):
        if turn is not None:
            struct = table.structs[at]
            struct.turn, struct.turned = turn.data_ptr(), turn.shape[1]
    return [turn for turn in found if turn is not None]


def _by_position(keys: ReadBlocks, span: Span, flat: ContiguousView) -> Chosen | str:
    """The blocks that a single row reads, the same in all layers and heads."""
    own, shape = span.positions[0] // keys.block, flat.layers[0].shape
    lists = _block_list(keys, own, shape.heads)
    if not lists.numel():
        return "only the row's own block is read"
    among = Candidates(0, own * keys.block, 1, lists.shape[1], SHARE, False, 0, 0)
    structs = Structures(LayerChoiceStruct, [LayerChoiceStruct(way=GIVEN, low=lists) for _ in flat.layers])
    return Chosen(among, 0, Ways(structs, kept=lists), among.listed(flat.n + 1) * flat.row_bytes)


@lru_cache(maxsize=64)
def _block_list(keys: ReadBlocks, own: int, heads: int) -> Tensor:
    """The slots of the blocks before its own that a row in block `own` reads, int32 [heads, S], increasing."""
    blocks = torch.tensor([block for block in keys.of(own) if block < own], dtype=torch.int32)
    slots = blocks[:, None] * keys.block + torch.arange(keys.block, dtype=torch.int32)
    return slots.flatten().repeat(heads, 1)


def _picks(keys: LayerPicks, span: Span, flat: ContiguousView) -> Chosen | str:
    """The choice of a plan in which some layers pick for those behind them; or why kernels do not make it."""
    if keys.weights is not None:
        return "kernels do not know these weights"
    n, layers = flat.n + 1, span.walk or range(len(flat.layers))
    ways = list[int]()
    for layer in layers:
        ways.append(PICKS if layer in keys.picking else AGAIN if PICKS in ways else ALL)
    among = Candidates(0, n - 1, 1, keys.k, PEAK, False, 0, n, width=flat.layers[0].shape.dim)
    row, picks, less = flat.row_bytes // len(layers), ways.count(PICKS), ways.count(AGAIN)
    read = (len(layers) - less) * n * row + picks * n * row // 2 + less * among.listed(n) * row
    structs = Structures(LayerChoiceStruct, [LayerChoiceStruct(way=way) for way in ways])
    lists = torch.empty((flat.layers[0].shape.heads, among.listed(n)), dtype=torch.int32)
    return Chosen(among, n, Ways(structs, lists=lists), read)


def _given(keys: NamedSlots, span: Span, flat: ContiguousView, stack: Stack) -> Chosen | str:
    """The choice that was made before this step; or why there is none."""
    given = None if keys.given is None or span.walk is not None else keys.given(span)
    if given is None:
        return "a function chooses what rows read"
    n, shape = flat.n + 1, flat.layers[0].shape
    queries = torch.empty((len(flat.layers), stack.heads[0], shape.dim), dtype=torch.bfloat16)
    among = Candidates(0, given.own, 1, given.lists[0].shape[1], SHARE, False, 0, 0)
    structs = Structures(LayerChoiceStruct, [LayerChoiceStruct(way=GIVEN, low=each) for each in given.lists])
    read = among.listed(n) * flat.row_bytes
    return Chosen(among, 0, Ways(structs, queries, kept=given.lists), read, partial(given.heard, queries))


# ---- the same for single rows, layer by layer
def choose(keys: TopK, singles: Mapping[int, tuple[Read, Any]]) -> dict[int, tuple[Tensor, UnlistedRest | None]]:
    """The slots int32 [h, 1, S] that single rows read at one layer, increasing, of those whose choice kernels make, and
    what stands for the rest. Each has its index; what is read of index and keys is counted."""
    kernel = keys.scorer.kernel
    if kernel is None:
        return {}
    if not kernel.softmax:
        return _pages(keys, singles)
    ballots: dict[int, Ballot] = {}
    for i, (read, index) in singles.items():
        ballot = _ballot(keys, kernel, read, index)
        if takes(ballot):
            among, lasting = ballot.candidates, kernel.vectors(read.part.n)
            each, sums = index.vectors[:, :, :1].nbytes, 0 if index.sums is None else index.sums.nbytes
            read.count_bytes((min(among.end, lasting) - among.begin) * each * among.looked // among.width + sums)
            read.count_keys(among.rows(lasting, lasting) * read.part.size[0])
            ballots[i] = ballot
    shapes: dict[int, list[int]] = {}  # a call takes one
    for i, ballot in ballots.items():
        shapes.setdefault(ballot.k.shape[0], []).append(i)
    found: dict[int, tuple[Tensor, UnlistedRest | None]] = {}
    for members in shapes.values():
        for i, slots in zip(members, choose_slots([ballots[i] for i in members])):
            read, index = singles[i]
            index.upto = max(index.upto, kernel.vectors(read.part.n))  # the kernel has added them
            found[i] = slots, ballots[i].rest
    return found


def _ballot(keys: TopK, kernel: KernelScores, read: Read, index: Standing) -> Ballot:
    part, layer = read.part, read.layer
    n, rest = part.size[1], None
    struct = Ways.layer(index.vectors, index.sums, read.scale if kernel.scaled else 1.0)
    if kernel.channels is not None:
        channels = kernel.channels[layer] if part.heads is None else kernel.channels[layer][part.heads]
        struct.point("channels", channels)
    if kernel.turned is not None and (turn := kernel.turned(layer, n - 1)) is not None:
        struct.point("turn", turn)
        struct.turned = turn.shape[1]
    if index.sums is not None:
        rest = UnlistedRest(index.sums.new_empty(read.q.shape[1]), torch.empty_like(index.sums))
    k, scale, v, v_scale = part.planes if len(part.planes) == 4 else (part.planes[0], None, part.planes[-1], None)
    among = candidates(keys, kernel, n, read.q.shape[2])
    return Ballot(read.q, k, scale, among, index.upto, struct, v, v_scale, rest)


def _pages(keys: TopK, singles: Mapping[int, tuple[Read, Any]]) -> dict[int, tuple[Tensor, UnlistedRest | None]]:
    """The same by upper bounds of pages."""
    pages: dict[int, listed.Pages] = {}
    for i, (read, index) in singles.items():
        kernel = keys.scorer.kernel
        assert kernel is not None
        among = candidates(keys, kernel, read.part.size[1], read.q.shape[2])
        low, *high = index.known
        own = (among.first + among.units) * among.size
        page = listed.Pages(read.q, low, high[0] if high else None, among.size, among.chosen, own, read.part.size[1])
        if listed.takes(page):
            read.count_bytes(sum(each.nbytes for each in index.known))
            pages[i] = page
    shapes: dict[int, list[int]] = {}
    for i, page in pages.items():
        shapes.setdefault(page.low.shape[0], []).append(i)
    found: dict[int, tuple[Tensor, UnlistedRest | None]] = {}
    for members in shapes.values():
        found |= {i: (slots, None) for i, slots in zip(members, listed.choose([pages[i] for i in members]))}
    return found
