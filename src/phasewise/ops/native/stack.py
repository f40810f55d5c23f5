"""Embeddings and all layers of a plain decoder in one native call, for steps in which nobody looks inside a layer."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from phasewise.ops.native import library
from phasewise.ops.native.spans import Common, Table, reaches
from phasewise.ops.native.weights import Packed

PER_CALL = struct.Struct("=7q")  # the end of StackCall
SLICE = 64  # a causal span of more rows is a slice of a prompt (LONG in stack.cpp)


@dataclass(frozen=True, eq=False)
class StackLayer:
    """What the kernel needs of one layer. `heads_norm` [Hq + H, D] is of queries and keys; `turn` its rotation."""

    products: tuple[Packed, Packed, Packed, Packed]  # qkv, o, gate and up, down
    before_attention: Tensor
    before_mlp: Tensor
    heads_norm: Tensor | None
    eps: tuple[float, float, float]
    turn: int | None
    window: int | None
    scale: float


@dataclass(frozen=True)
class StackShape:
    hidden: int
    heads_q: int
    heads: int
    dim: int
    inner: int


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
    """`rows` rows that end at slot `n`; `sees` as in Few.

    `planes` is the address of int64 [layers, 6]: addresses of the keys and the values [H, cap, D], cap * D, then 0, 0,
    0; or, where these are int8, the addresses of their scales bfloat16 [H, cap], and cap.
    """

    n: int
    rows: int
    sees: Tensor | None
    planes: int


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
        self._kept: list[object] = [layers, table]
        words = array("q")
        for layer in layers:
            norms = zip((layer.before_attention, layer.before_mlp, layer.heads_norm), layer.eps)
            for weight, eps in norms:
                words.append(0 if weight is None else self._keep(weight.float().contiguous()))
                words.frombytes(struct.pack("d", eps))
            words.extend(product.address for product in layer.products)
            words.append(layer.products[0].int8)
            words.extend([-1 if layer.turn is None else layer.turn, layer.window or 0])
            words.frombytes(struct.pack("d", layer.scale))
        self._layers, self.hidden = words, shape.hidden
        if isinstance(table, Tensor):
            self._table = array("q", (0, self._keep(table.contiguous()), 0, table.shape[0]))
        else:
            self._table = array("q", (table.address, 0, table.int8, table.outputs))
        self._table.frombytes(struct.pack("d", scale))
        self._fixed = (
            words.buffer_info()[0], self._table.buffer_info()[0], len(layers),
            shape.hidden, shape.heads_q, shape.heads, shape.dim, shape.inner,
        )  # fmt: skip
        self._run = kernels.stack
        self._last: _Ready | None = None

    def _keep(self, tensor: Tensor) -> int:
        self._kept.append(tensor)
        return tensor.data_ptr()

    def __call__(
        self, numbers: array[int], turns: Turns, spans: Sequence[StackSpan], x: Tensor,
        commons: Sequence[Common] = (),
    ) -> None:  # fmt: skip
        """`numbers` int64 [2 T]: tokens, then their positions, all within the tables of `turns`. Writes x.

        No layer's window may hide slots of `commons`, nor any of a span of more than SLICE rows; none of those are
        members of `commons`. Raises IndexError for a token that has no embedding, and nothing is written.
        """
        table, shared, ready = array("q"), Table(commons), self._last
        if ready is None or ready.rows is not x:
            self._last = ready = _Ready(x, self._fixed)
        for (n, own, sees, planes), reach in zip(spans, reaches(commons, len(spans))):
            table.extend((n, own, 0 if sees is None else sees.data_ptr(), reach, planes))
        tokens, words = numbers.buffer_info()
        PER_CALL.pack_into(
            ready.call, ready.tail, turns.address, tokens, tokens + 4 * words,
            table.buffer_info()[0], len(spans), shared.address, shared.count,
        )  # fmt: skip
        if self._run(ready.address):
            wrong = numbers[: words // 2].tolist()
            raise IndexError(f"tokens {wrong} are not all among the {self._table[3]} of the model")
