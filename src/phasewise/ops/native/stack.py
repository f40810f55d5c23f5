"""Embeddings and all layers of a decoder in one native call, for steps in which nobody looks inside a layer."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from phasewise.ops.native import library
from phasewise.ops.native.abi import (
    EmbeddingsStruct,
    ExpertsStruct,
    GateStruct,
    HeadStruct,
    LayerStruct,
    LowRankStruct,
    NormStruct,
    PlanesStruct,
    SidesStruct,
    StackCallStruct,
    StackSpanStruct,
    Structures,
    TunedStruct,
    TurnStruct,
    address,
)
from phasewise.ops.native.choice import Chosen
from phasewise.ops.native.spans import BLOCK, Common, CommonTable, reaches
from phasewise.ops.native.weighed import Weighs
from phasewise.ops.native.weights import PackedWeights

SLICE = 64  # a span of more rows is a slice of a prompt, unless it is a tree (LONG in stack.cpp)


LINEARS = 4  # linear layers of a layer that may have low-rank weights
BIAS_BYTES = 4  # of a bias, float32
ACTIVATIONS = ("silu", "gelu_pytorch_tanh", "gelu", "relu", "clamped")  # as kernels.h numbers them


LowRank = tuple[PackedWeights, PackedWeights]
"""Low-rank weights beside a linear layer's own, down and up: y += (x down^T) up^T."""


class StackNorm(NamedTuple):
    weight: Tensor
    eps: float


@dataclass(frozen=True, eq=False)
class StackExperts:
    """A layer's experts, gate and up with down."""

    router: PackedWeights
    products: Sequence[tuple[PackedWeights, PackedWeights]]
    top: int
    renormalise: bool


class StackGate(NamedTuple):
    """What a gated MLP makes of gates and ups: one of ACTIVATIONS, the last of them with its numbers."""

    activation: str
    alpha: float = 0.0
    limit: float = 0.0


@dataclass(frozen=True, eq=False)
class StackLayer:
    """One layer as the kernel takes it; where there is no attention or no MLP, rows pass that by. `heads_norm`
    [Hq + H, D] is of queries and keys, each head by itself; or, if `whole`, over all queries of a row, then over all
    its keys. `turn` is its rotation. `beside`: low-rank weights of qkv, o, gate and up, and down, where there are any;
    all rows run with them but those of spans that bring a table of their own."""

    attention: tuple[PackedWeights, PackedWeights] | None  # qkv, o
    mlp: tuple[PackedWeights, PackedWeights] | StackExperts | None  # gate and up, down
    norms: Sequence[StackNorm | None]  # before and after attention, before and after the MLP
    heads_norm: StackNorm | None
    whole: bool
    gate: StackGate
    turn: int | None
    window: int | None
    scale: float
    softcap: float | None
    sink_scores: Tensor | None = None  # float32 [Hq], as in kernels.h
    beside: Sequence[LowRank | None] = ()


@dataclass(frozen=True)
class StackShape:
    hidden: int
    heads_q: int
    heads: int
    dim: int


class Turns:
    """Rotations as the kernels take them: bfloat16 cos and signed sin [P, 1, R] of each, alive with the object."""

    __slots__ = ("_structs", "address")

    def __init__(self, tables: Sequence[tuple[Tensor, Tensor]]) -> None:
        self._structs = Structures(TurnStruct, [TurnStruct(cos=c, sin=s, size=c.shape[-1]) for c, s in tables])
        self.address = self._structs.address


class StackSpan(NamedTuple):
    """`rows` rows that end at slot `n`; `sees` as in Few, `block` as in Seen.

    `planes`: where its keys and values lie in every layer (Planes [layers] in kernels.h), by address.

    With a `window`, rows see so many slots and the first `sinks` (see Seen), counted from `seats` where given. Rows
    seated from slot `beyond` on read the sinks as if they stood at place `near` of the turns; -1: all read them alike.
    With a `choice`, which no layer's window or cap may meet, its row reads less. `sealed` says for every layer where
    its first slots lie packed, and `size` the bytes of all it then reads. If these are others for each of its rows,
    `pieces` are its rows. `unequal`, instead of `planes`, is the address of Head
    (kernels.h) [layers, H], where heads hold unequally many rows, of which `missing` bytes are less than n of each, or
    where some see windows (`narrow`); such a span has neither window nor choice. With a `weighed` its
    only row, of plain KV, does not see all, and says what it attends to. All these are members of no common. `tuned`:
    the address of LowRank (kernels.h) [layers, 4], low-rank weights that its rows run with instead of the stack's; its
    last `gated_rows` run with those at `gated`.
    `bias`: that of float32 [layers, Hq], added to the scores of slot 0 as in Seen; such a span is no member of a common
    either, nor `unequal`.
    `shared`: the address of Planes [layers, shared_slots / BLOCK], where its first slots lie instead of at `planes`,
    block by block, and none of its own; such a span is neither `sealed` nor `unequal`, and has no choice.
    """

    n: int
    rows: int
    sees: Tensor | None
    planes: int
    window: int = 0
    sinks: int = 0
    near: int = -1
    beyond: int = 0
    seats: array[int] | None = None
    block: int = 1
    choice: Chosen | None = None
    sealed: Structures[SidesStruct] | None = None
    size: int = 0
    pieces: tuple[StackSpan, ...] = ()
    unequal: int = 0
    missing: int = 0
    weighed: Weighs | None = None
    tuned: int = 0
    gated: int = 0
    gated_rows: int = 0
    narrow: bool = False
    bias: int = 0
    shared: int = 0
    shared_slots: int = 0

    @property
    def alone(self) -> bool:
        """True if its rows share no read with other spans of the call."""
        return self.choice is not None or self.weighed is not None or self.narrow or self.bias != 0

    @property
    def reads(self) -> int:
        """The number of slots that some of its rows see."""
        return seen_slots(self.n, self.rows, self.window, self.sinks) if self.window else self.n

    @property
    def divides(self) -> bool:
        """True if what it holds by layer lies in structures of one layer after another (`behind`)."""
        return self.choice is None and self.weighed is None and self.sealed is None

    def behind(self, layers: int, heads_q: int, heads: int) -> StackSpan:
        """The same span without the first `layers` of its layers, of a model with so many heads."""
        if not layers:
            return self
        planes, unequal, tuned, gated, bias = self.planes, self.unequal, self.tuned, self.gated, self.bias
        return self._replace(
            planes=planes and planes + layers * PlanesStruct.byte_count(),
            unequal=unequal and unequal + layers * heads * HeadStruct.byte_count(),
            tuned=tuned and tuned + layers * LINEARS * LowRankStruct.byte_count(),
            gated=gated and gated + layers * LINEARS * LowRankStruct.byte_count(),
            bias=bias and bias + layers * heads_q * BIAS_BYTES,
            shared=self.shared + layers * self.shared_slots // BLOCK * PlanesStruct.byte_count(),
        )

    def fill(self, to: StackSpanStruct, common: int) -> None:
        """Write this span, whose first `common` slots are read in common, to a structure that is all 0."""
        to.n, to.rows, to.common, to.planes, to.block, to.near = (
            self.n, self.rows, common, self.planes, self.block, self.near
        )  # fmt: skip
        if self.sees is not None:
            to.sees, to.first = self.sees.data_ptr(), self.sees.shape[1] - self.rows
        if self.window:
            to.window, to.sinks, to.beyond = self.window, self.sinks, self.beyond
        if self.seats is not None:
            to.seats = self.seats.buffer_info()[0]
        if self.choice is not None:
            to.choice = self.choice.address
        if self.sealed is not None:
            to.sealed = self.sealed.address
        if self.weighed is not None:
            to.tally = self.weighed.room.address
        if self.shared_slots:
            to.shared, to.shared_slots = self.shared, self.shared_slots
        to.unequal, to.bias = self.unequal, self.bias


def seen_slots(n: int, rows: int, window: int, sinks: int) -> int:
    """The number of slots that some of `rows` rows see, which end at slot `n`, through a window with sinks."""
    start = n - rows + 1 - window  # of the first row's window
    return n - max(0, start - sinks)


class _Ready:
    """A call for rows in the same memory as in the last one, but for what is another in every call."""

    __slots__ = ("address", "call", "rows")

    def __init__(self, rows: Tensor, call: StackCallStruct) -> None:
        self.rows, self.call, self.address = rows, call, call.address


class Stack:
    """Tokens -> x bfloat16 [T, d] after all layers; keys and values of the rows are written to their slots.

    Tokens are rows of `table` [V, d], taken `scale` times. A row's result depends on that row and the slots it sees,
    bit for bit. There must be a `library()`. A call takes as many threads as torch has when its `x` is another than
    that of the call before.
    """

    def __init__(
        self, layers: Sequence[StackLayer], shape: StackShape, table: PackedWeights | Tensor, scale: float = 1.0
    ) -> None:
        kernels = library()
        assert kernels is not None
        self.windowed = any(layer.window is not None for layer in layers)
        self.capped = any(layer.softcap is not None for layer in layers)
        self._kept: list[object] = [layers, table]
        counts = [len(layer.mlp.products) if isinstance(layer.mlp, StackExperts) else 0 for layer in layers]
        self._loads = torch.zeros((len(layers), max(counts)), dtype=torch.uint8) if any(counts) else None
        self.beside = {(i, which): pair for i, layer in enumerate(layers)
                       for which, pair in enumerate(layer.beside) if pair is not None}  # fmt: skip
        self._beside = low_rank_table(range(len(layers)), self.beside) if self.beside else None
        self._layers = Structures(LayerStruct, [self._layer(layer, i) for i, layer in enumerate(layers)])
        self.hidden, self.count = shape.hidden, len(layers)
        self.reading = sum(layer.attention is not None for layer in layers)
        self._made = layers, shape, table, scale
        self.heads = shape.heads_q, shape.heads, shape.dim
        if isinstance(table, Tensor):
            self._table = EmbeddingsStruct(plain=table.contiguous(), vocab=table.shape[0], scale=scale)
        else:
            self._table = EmbeddingsStruct(packed=table.address, vocab=table.outputs, scale=scale)
        self._run = kernels.stack
        self._last: _Ready | None = None

    def only(self, attention: Collection[int], mlp: Collection[int]) -> Stack:
        """The same with the attentions and the MLPs of these layers alone."""
        layers, shape, table, scale = self._made
        kept = [
            replace(layer, attention=layer.attention if i in attention else None, mlp=layer.mlp if i in mlp else None)
            for i, layer in enumerate(layers)
        ]
        return Stack(kept, shape, table, scale)

    def _layer(self, layer: StackLayer, index: int) -> LayerStruct:
        norms = [
            NormStruct() if norm is None else NormStruct(weight=norm.weight.float().contiguous(), eps=norm.eps)
            for norm in (*layer.norms, layer.heads_norm)
        ]
        how = layer.gate
        made = LayerStruct(
            before_attention=norms[0], after_attention=norms[1], before_mlp=norms[2], after_mlp=norms[3],
            heads=norms[4], whole=layer.whole, turn=-1 if layer.turn is None else layer.turn, window=layer.window or 0,
            scale=layer.scale, softcap=layer.softcap or 0.0, sink_scores=layer.sink_scores,
            gate=GateStruct(activation=ACTIVATIONS.index(how.activation), alpha=how.alpha, limit=how.limit),
        )  # fmt: skip
        if layer.attention is not None:
            made.qkv, made.o = (product.address for product in layer.attention)
        if isinstance(layer.mlp, StackExperts):
            made.point("experts", self._experts(layer.mlp, index))
        elif layer.mlp is not None:
            made.gate_up, made.down = (product.address for product in layer.mlp)
        return made

    def _experts(self, experts: StackExperts, index: int) -> ExpertsStruct:
        assert self._loads is not None
        products = array("q", [product.address for both in experts.products for product in both])
        return ExpertsStruct(
            router=experts.router.address, products=products, count=len(experts.products), top=experts.top,
            renormalise=experts.renormalise, loads=self._loads[index],
        )  # fmt: skip

    def loaded(self) -> int:
        """The number of experts whose weights were read since the last call, each counted once per layer."""
        if self._loads is None:
            return 0
        count = int(self._loads.sum())
        self._loads.zero_()
        return count

    def __call__(
        self, numbers: array[int], turns: Turns, spans: Sequence[StackSpan], x: Tensor,
        commons: Sequence[Common] = (),
    ) -> None:  # fmt: skip
        """`numbers` int64 [2 T]: tokens, then their places in the tables of `turns`. Writes x.

        No layer's window may hide slots of `commons`, nor any of a span that has a window; spans that have one or a
        choice, and slices, are no members of `commons`. Raises IndexError for a token that has no embedding, and
        nothing is written.
        """
        Halves(self, numbers, turns, spans, PassBuffers(x), commons).upto(2 * self.count)

    def call(self, x: Tensor) -> StackCallStruct:
        """The call that writes x; what was set in it for the last one is to be set anew."""
        ready = self._last
        if ready is None or ready.rows is not x:
            heads_q, heads, dim = self.heads
            call = StackCallStruct(
                layers=self._layers, embeddings=self._table, count=self.count, hidden=self.hidden, heads_q=heads_q,
                heads=heads, dim=dim, x=x.data_ptr(), rows=x.shape[0], threads=torch.get_num_threads(),
            )  # fmt: skip
            self._last = ready = _Ready(x, call)
        return ready.call

    def tuned(self, spans: Sequence[StackSpan]) -> Structures[TunedStruct]:
        """The rows of a call that run with low-rank weights, by the tables of their spans or by the stack's own."""
        return _tuned(spans, 0 if self._beside is None else self._beside.address)

    def run(self, call: StackCallStruct) -> bool:
        """The kernel. -> whether it has done what is asked."""
        return not self._run(call.address)

    @property
    def vocab(self) -> int:
        return self._table.vocab


class PassBuffers(NamedTuple):
    """The buffers that a pass writes: x bfloat16 [T, d]; and, if it stops in between, what the layer under way goes on
    from: qkv bfloat16 [T, Hq + 2 H, D], read bfloat16 [T, Hq, D], far [T, Hq, D] (queries of sinks)."""

    x: Tensor
    qkv: Tensor | None = None
    read: Tensor | None = None
    far: Tensor | None = None


class Halves:
    """One pass of a stack over rows, as `Stack.__call__` takes them, that may stop within layers: in layer i after half
    2 i, when its queries stand in `qkv` and its keys and values in their slots, or after half 2 i + 1, its end.

    Spans that are `done` have what they read of the layer under way in `read` by then; the kernel computes it for the
    others.
    """

    __slots__ = ("_at", "_embedded", "_items", "_numbers", "_places", "_rows", "_shared", "_spans", "_stack", "_table",
                 "_tuned", "_turns", "x")  # fmt: skip

    def __init__(
        self, stack: Stack, numbers: array[int], turns: Turns, spans: Sequence[StackSpan], rows: PassBuffers,
        commons: Sequence[Common] = (),
    ) -> None:  # fmt: skip
        self.x, self._stack, self._numbers, self._turns = rows.x, stack, numbers, turns
        self._tuned = stack.tuned(spans)
        self._rows, self._embedded, self._at = rows, False, 0
        self._spans = spans  # whose seats the table has the addresses of
        pieces = [span.pieces or (span,) for span in spans]
        self._places = list(accumulate(map(len, pieces), initial=0))  # of each span, its first one of the table
        self._table = Structures.zeros(StackSpanStruct, self._places.pop())
        self._items = list(self._table)
        for some, place, reach in zip(pieces, self._places, reaches(commons, len(spans))):
            for i, one in enumerate(some, place):
                one.fill(self._items[i], reach)
        self._shared = CommonTable([c._replace(members=tuple(self._places[m] for m in c.members)) for c in commons])

    @property
    def between(self) -> tuple[Tensor, Tensor]:
        """Queries [T, Hq, D] of the layer under way, and where `done` spans put what they read [T, Hq, D]."""
        _, qkv, read, _ = self._rows
        assert qkv is not None and read is not None
        return qkv[:, : read.shape[1]], read

    def enter(self, x: Tensor) -> None:
        """Take x [T, d] in the place of the tokens' embeddings."""
        self.x.copy_(x)
        self._embedded = True

    def done(self, span: int) -> None:
        """Until the next stop."""
        self._items[self._places[span]].done = 1

    def again(
        self, numbers: array[int], turns: Turns, ends: Sequence[int], stops: Sequence[tuple[int, int]] = ()
    ) -> dict[int, Tensor]:
        """Run a whole pass over the same spans, single rows of plain KV, for other tokens and places; each now ends at
        another slot. Returns and raises as `through` does."""
        self._numbers, self._turns, self._at = numbers, turns, 0
        for span, n in zip(self._items, ends):
            span.n = n
        return self.through(stops)

    def through(self, stops: Sequence[tuple[int, int]] = ()) -> dict[int, Tensor]:
        """Run all halves that have not run. Returns copies of x, [T, d] each by its name: `stops` are names and the
        halves before which they are made, in order. Raises as `upto` does."""
        kept, end = dict[int, Tensor](), 2 * self._stack.count
        for name, half in stops:
            self.upto(half)
            kept[name] = self.x.clone()
        if self._at < end:
            self.upto(end)
        return kept

    def upto(self, half: int) -> None:
        """Run the halves before `half` that have not run. Raises IndexError for a token that has no embedding."""
        if half == self._at:
            return
        tokens, words = self._numbers.buffer_info()
        call, (_, qkv, read, far) = self._stack.call(self.x), self._rows
        call.turns, call.positions = self._turns.address, tokens + 4 * words
        call.tokens = 0 if self._at > 0 or self._embedded else tokens
        call.spans, call.span_count = self._table.address, len(self._table)
        call.commons, call.common_count = self._shared.address, self._shared.count
        call.from_, call.to = self._at, half
        call.qkv, call.read, call.far = address(qkv), address(read), address(far)
        call.tuned, call.tuned_count = self._tuned.address, len(self._tuned)
        ran = self._stack.run(call)
        if not ran:
            wrong = self._numbers[: words // 2].tolist()
            raise IndexError(f"tokens {wrong} are not all among the {self._stack.vocab} of the model")
        self._at = half
        if qkv is not None:
            for span in self._items:
                span.done = 0


def low_rank_table(layers: Sequence[int], pairs: Mapping[tuple[int, int], LowRank]) -> Structures[LowRankStruct]:
    """LowRank (kernels.h) [layers, 4] of what lies beside (layer, linear). The weights must be kept alive."""
    found = [pairs.get((layer, which)) for layer in layers for which in range(LINEARS)]
    return Structures(LowRankStruct, [
        LowRankStruct() if pair is None else LowRankStruct(down=pair[0].address, up=pair[1].address) for pair in found
    ])  # fmt: skip


def _tuned(spans: Sequence[StackSpan], own: int) -> Structures[TunedStruct]:
    """Rows that run with low-rank weights; neighbours that share them are one item. `own`: the address of the stack's
    table, for spans that bring none; 0: it has none."""
    found, at = list[TunedStruct](), 0
    for span in spans:
        for layers, rows in ((span.tuned or own, span.rows - span.gated_rows), (span.gated, span.gated_rows)):
            if layers and found and (found[-1].to, found[-1].layers) == (at, layers):
                found[-1].to += rows
            elif layers and rows:
                found.append(TunedStruct(from_=at, to=at + rows, layers=layers))
            at += rows
    return Structures(TunedStruct, found)
