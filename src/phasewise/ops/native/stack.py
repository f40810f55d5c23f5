"""Embeddings and all layers of a decoder in one native call, for steps in which nobody looks inside a layer."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from phasewise.ops.native import library
from phasewise.ops.native.choice import Chosen
from phasewise.ops.native.spans import Common, Table, reaches
from phasewise.ops.native.weighed import Weighs
from phasewise.ops.native.weights import Packed

PER_CALL = struct.Struct("=14q")  # the end of StackCall
SLICE = 64  # a span of more rows is a slice of a prompt, unless it is a tree (LONG in stack.cpp)


ACTIVATIONS = ("silu", "gelu_pytorch_tanh", "gelu", "relu")  # as kernels.h numbers them


class StackNorm(NamedTuple):
    weight: Tensor
    eps: float


@dataclass(frozen=True, eq=False)
class StackExperts:
    """A layer's experts, gate and up with down; the router's weights are bfloat16 whatever theirs are."""

    router: Packed
    products: Sequence[tuple[Packed, Packed]]
    top: int
    renormalise: bool


@dataclass(frozen=True, eq=False)
class StackLayer:
    """What the kernel needs of one layer; where there is no attention or no MLP, rows pass that by. `heads_norm`
    [Hq + H, D] is of queries and keys, each head by itself; or, if `whole`, over all queries of a row, then over all
    its keys. `turn` is its rotation."""

    attention: tuple[Packed, Packed] | None  # qkv, o
    mlp: tuple[Packed, Packed] | StackExperts | None  # gate and up, down
    norms: Sequence[StackNorm | None]  # before and after attention, before and after the MLP
    heads_norm: StackNorm | None
    whole: bool
    activation: str
    turn: int | None
    window: int | None
    scale: float
    softcap: float | None


@dataclass(frozen=True)
class StackShape:
    hidden: int
    heads_q: int
    heads: int
    dim: int


class Turns:
    """Rotations as the kernels take them: bfloat16 cos and signed sin [P, 1, R] of each, alive with the object."""

    __slots__ = ("_kept", "_words", "address")

    def __init__(self, tables: Sequence[tuple[Tensor, Tensor]]) -> None:
        self._kept = tables
        self._words = array("q")
        for cos, sin in tables:
            self._words.extend((cos.data_ptr(), sin.data_ptr(), cos.shape[-1]))
        self.address = self._words.buffer_info()[0]


class StackSpan(NamedTuple):
    """`rows` rows that end at slot `n`; `sees` as in Few, `block` as in Seen.

    `planes` is the address of int64 [layers, 6]: addresses of the keys and the values [H, cap, D], cap * D, then 0, 0,
    0; or, where these are int8, the addresses of their scales bfloat16 [H, cap], and cap.

    With a `window`, rows see so many slots and the first `sinks` (see Seen), counted from `seats` where given. Rows
    seated from slot `beyond` on read the sinks as if they stood at place `near` of the turns; -1: all read them alike.
    With a `choice`, which no layer's window or cap may meet, its row reads less. `sealed` are the words of a Sides
    (kernels.h) for every layer, where its first slots lie packed, and `size` the bytes of all it then reads. If these
    are others for each of its rows, `pieces` are its rows. `unequal`, instead of `planes`, is the address of Head
    (kernels.h) [layers, H], where heads hold unequally many rows, of which `missing` bytes are less than n of each, or
    where some see windows (`narrow`); such a span has neither window nor choice. With a `weighed` its
    only row, of plain KV, does not see all, and says what it attends to. All these are members of no common. `tuned`:
    the address of LowRank (kernels.h) [layers, 4], low-rank weights that its rows run with. `bias`: that of float32
    [layers, Hq], added to the scores of slot 0 as in Seen; such a span is no member of a common either, nor `unequal`.
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
    sealed: array[int] | None = None
    size: int = 0
    pieces: tuple[StackSpan, ...] = ()
    unequal: int = 0
    missing: int = 0
    weighed: Weighs | None = None
    tuned: int = 0
    narrow: bool = False
    bias: int = 0

    @property
    def alone(self) -> bool:
        """Whether what its rows read, or say of that, is its own matter within the call."""
        return self.choice is not None or self.weighed is not None or self.narrow or self.bias != 0

    @property
    def reads(self) -> int:
        """How many slots some of its rows see."""
        start = self.n - self.rows + 1 - self.window  # of the first row's window
        return self.n - max(0, start - self.sinks) if self.window else self.n

    @property
    def words(self) -> tuple[int, ...]:
        seats = 0 if self.seats is None else self.seats.buffer_info()[0]
        first = 0 if self.sees is None else self.sees.shape[1] - self.rows
        choice = 0 if self.choice is None else self.choice.address
        sealed = 0 if self.sealed is None else self.sealed.buffer_info()[0]
        tally = 0 if self.weighed is None else self.weighed.room.address
        return (self.window, self.sinks, self.near, self.beyond, seats, self.block, first, choice, sealed, self.unequal,
                tally, self.bias)  # fmt: skip


WORDS = 18  # of a span in the call
DONE = 5  # which of them says so


class _Ready:
    """A call for rows in the same memory as in the last one, but for its last words (PER_CALL)."""

    __slots__ = ("address", "call", "rows", "tail")

    def __init__(self, rows: Tensor, fixed: Sequence[int]) -> None:
        self.rows = rows
        self.call = array("q", (*fixed, rows.data_ptr(), rows.shape[0], torch.get_num_threads()))
        self.tail = 8 * len(self.call)
        self.call.frombytes(bytes(PER_CALL.size))
        self.address = self.call.buffer_info()[0]


class Stack:
    """Tokens -> x bfloat16 [T, d] after all layers; keys and values of the rows are written to their slots.

    Tokens are rows of `table` [V, d], taken `scale` times. A row's result depends on that row and the slots it sees,
    bit for bit. There must be a `library()`. A call takes as many threads as torch has when its `x` is another than
    that of the call before.
    """

    def __init__(
        self, layers: Sequence[StackLayer], shape: StackShape, table: Packed | Tensor, scale: float = 1.0
    ) -> None:
        kernels = library()
        assert kernels is not None
        self.windowed = any(layer.window is not None for layer in layers)
        self.capped = any(layer.softcap is not None for layer in layers)
        self._kept: list[object] = [layers, table]
        counts = [len(layer.mlp.products) if isinstance(layer.mlp, StackExperts) else 0 for layer in layers]
        self._loads = torch.zeros((len(layers), max(counts)), dtype=torch.uint8) if any(counts) else None
        words = array("q")
        for i, layer in enumerate(layers):
            words.extend(self._layer(layer, i))
        self._layers, self.hidden, self.count = words, shape.hidden, len(layers)
        self.reading = sum(layer.attention is not None for layer in layers)
        self._made = layers, shape, table, scale
        self.heads = shape.heads_q, shape.heads, shape.dim
        if isinstance(table, Tensor):
            self._table = array("q", (0, self._keep(table.contiguous()), 0, table.shape[0]))
        else:
            self._table = array("q", (table.address, 0, table.int8, table.outputs))
        self._table.frombytes(struct.pack("d", scale))
        self._fixed = (
            words.buffer_info()[0], self._table.buffer_info()[0], len(layers),
            shape.hidden, shape.heads_q, shape.heads, shape.dim,
        )  # fmt: skip
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

    def _layer(self, layer: StackLayer, index: int) -> array[int]:
        words = array("q")
        for norm in (*layer.norms, layer.heads_norm):
            words.append(0 if norm is None else self._keep(norm.weight.float().contiguous()))
            words.frombytes(struct.pack("d", 0.0 if norm is None else norm.eps))
        words.append(layer.whole)
        attention, mlp = layer.attention or (), layer.mlp or ()
        words.extend([product.address for product in attention] or (0, 0))
        if isinstance(mlp, StackExperts):
            words.extend((0, 0, self._experts(mlp, index)))
            mlp = mlp.products[0]
        else:
            words.extend((*([product.address for product in mlp] or (0, 0)), 0))
        rounded = any(product.int8 for product in (*attention, *mlp))
        words.extend((rounded, ACTIVATIONS.index(layer.activation)))
        words.extend((-1 if layer.turn is None else layer.turn, layer.window or 0))
        words.frombytes(struct.pack("2d", layer.scale, layer.softcap or 0.0))
        return words

    def _experts(self, experts: StackExperts, index: int) -> int:
        assert self._loads is not None
        products = array("q", [product.address for both in experts.products for product in both])
        words = array("q", (experts.router.address, products.buffer_info()[0], len(experts.products), experts.top))
        words.extend((experts.renormalise, self._loads[index].data_ptr()))
        self._kept += [products, words]
        return words.buffer_info()[0]

    def loaded(self) -> int:
        """How many experts' weights were read since it was last asked, each counted once per layer."""
        if self._loads is None:
            return 0
        count = int(self._loads.sum())
        self._loads.zero_()
        return count

    def _keep(self, tensor: Tensor) -> int:
        self._kept.append(tensor)
        return tensor.data_ptr()

    def __call__(
        self, numbers: array[int], turns: Turns, spans: Sequence[StackSpan], x: Tensor,
        commons: Sequence[Common] = (),
    ) -> None:  # fmt: skip
        """`numbers` int64 [2 T]: tokens, then their places in the tables of `turns`. Writes x.

        No layer's window may hide slots of `commons`, nor any of a span that has a window; spans that have one or a
        choice, and slices, are no members of `commons`. Raises IndexError for a token that has no embedding, and
        nothing is written.
        """
        Halves(self, numbers, turns, spans, Rows(x), commons).upto(2 * self.count)

    def run(self, x: Tensor, *rest: int) -> bool:
        """The kernel, with the last words of its StackCall (PER_CALL). -> whether it has done it."""
        ready = self._last
        if ready is None or ready.rows is not x:
            self._last = ready = _Ready(x, self._fixed)
        PER_CALL.pack_into(ready.call, ready.tail, *rest)
        return not self._run(ready.address)

    @property
    def vocab(self) -> int:
        return self._table[3]


class Rows(NamedTuple):
    """What a pass writes: x bfloat16 [T, d]; and, if it stops in between, what the layer under way goes on from: qkv
    bfloat16 [T, Hq + 2 H, D], read bfloat16 [T, Hq, D], far [T, Hq, D] (queries of sinks)."""

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

    __slots__ = ("_at", "_embedded", "_numbers", "_places", "_rows", "_shared", "_spans", "_stack", "_table", "_tuned",
                 "_turns", "x")  # fmt: skip

    def __init__(
        self, stack: Stack, numbers: array[int], turns: Turns, spans: Sequence[StackSpan], rows: Rows,
        commons: Sequence[Common] = (),
    ) -> None:  # fmt: skip
        self.x, self._stack, self._numbers, self._turns = rows.x, stack, numbers, turns
        self._tuned = _tuned(spans)
        self._rows, self._embedded, self._at = rows, False, 0
        self._spans = spans  # whose seats the table has the addresses of
        self._places, self._table = list[int](), array("q")  # of each span, its first line of the table
        for span, reach in zip(spans, reaches(commons, len(spans))):
            self._places.append(len(self._table) // WORDS)
            for one in span.pieces or (span,):
                sees = 0 if one.sees is None else one.sees.data_ptr()
                self._table.extend((one.n, one.rows, sees, reach, one.planes, 0, *one.words))
        self._shared = Table([c._replace(members=tuple(self._places[m] for m in c.members)) for c in commons])

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
        self._table[WORDS * self._places[span] + DONE] = 1

    def upto(self, half: int) -> None:
        """Run the halves before `half` that have not run. Raises IndexError for a token that has no embedding."""
        if half == self._at:
            return
        tokens, words = self._numbers.buffer_info()
        given = self._at > 0 or self._embedded
        room = [0 if each is None else each.data_ptr() for each in self._rows[1:]]
        count = len(self._table) // WORDS
        tuned = self._tuned.buffer_info()[0], len(self._tuned) // 3
        ran = self._stack.run(
            self.x, self._turns.address, 0 if given else tokens, tokens + 4 * words, self._table.buffer_info()[0],
            count, self._shared.address, self._shared.count, self._at, half, *room, *tuned,
        )  # fmt: skip
        if not ran:
            wrong = self._numbers[: words // 2].tolist()
            raise IndexError(f"tokens {wrong} are not all among the {self._stack.vocab} of the model")
        self._at = half
        if room[0]:
            self._table[DONE::WORDS] = array("q", bytes(8 * count))


def _tuned(spans: Sequence[StackSpan]) -> array[int]:
    """Which rows run with which low-rank weights (Tuned)."""
    found, at = array("q"), 0
    for span in spans:
        if span.tuned and found and found[-2:].tolist() == [at, span.tuned]:
            found[-2] += span.rows
        elif span.tuned:
            found.extend((at, at + span.rows, span.tuned))
        at += span.rows
    return found
