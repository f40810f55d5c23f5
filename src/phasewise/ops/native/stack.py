"""All layers of a plain decoder in one native call, for steps in which nobody looks inside a layer."""

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

SPAN = struct.Struct("=80x4q32x")  # Span in kernels.h: n, rows, sees, common; the kernel finds the rest by layer
CALL = struct.Struct("=17q")  # StackCall in kernels.h
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


class StackSpan(NamedTuple):
    """`rows` rows that end at slot `n`; `sees` as in Few.

    `planes` is the address of int64 [layers, 6]: addresses of the keys and the values [H, cap, D], cap * D, then 0, 0,
    0; or, where these are int8, the addresses of their scales bfloat16 [H, cap], and cap.
    """

    n: int
    rows: int
    sees: Tensor | None
    planes: int


class Stack:
    """x [T, d] bfloat16 -> x [T, d] after all layers; keys and values of the rows are written to their slots.

    A row's result depends on that row and the slots it sees, bit for bit. There must be a `library()`.
    """

    def __init__(self, layers: Sequence[StackLayer], shape: StackShape) -> None:
        kernels = library()
        assert kernels is not None
        self.windowed = any(layer.window is not None for layer in layers)
        self._kept: list[object] = [layers]
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
        self._layers, self._count = words, len(layers)
        self._shape = (shape.hidden, shape.heads_q, shape.heads, shape.dim, shape.inner)
        self._run = kernels.stack

    def _keep(self, tensor: Tensor) -> int:
        self._kept.append(tensor)
        return tensor.data_ptr()

    def __call__(
        self, x: Tensor, positions: Tensor, turns: Sequence[tuple[Tensor, Tensor]], spans: Sequence[StackSpan],
        commons: Sequence[Common] = (),
    ) -> Tensor:  # fmt: skip
        """Changes x in place and returns it. `turns`: bfloat16 cos and signed sin [P, 1, R] of each rotation, for all
        `positions` int64 [T] of the rows.

        No layer's window may hide slots of `commons`, nor any of a span of more than SLICE rows; none of those are
        members of `commons`.
        """
        rotations = [word for cos, sin in turns for word in (cos.data_ptr(), sin.data_ptr(), cos.shape[-1])]
        tables, table = array("q", rotations), array("q")
        for span, reach in zip(spans, reaches(commons, len(spans))):
            sees = 0 if span.sees is None else span.sees.data_ptr()
            table.frombytes(SPAN.pack(span.n, span.rows, sees, reach))
        planes, shared = array("q", [span.planes for span in spans]), Table(commons)
        turned, listed, placed = tables.buffer_info()[0], table.buffer_info()[0], planes.buffer_info()[0]
        given = (self._layers.buffer_info()[0], turned, positions.data_ptr(), listed, placed, x.data_ptr())
        sizes = (self._count, len(spans), x.shape[0], *self._shape, torch.get_num_threads())
        call = array("q", CALL.pack(*given, *sizes, shared.address, shared.count))
        self._run(call.buffer_info()[0])
        return x
