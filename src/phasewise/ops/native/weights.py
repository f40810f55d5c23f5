"""Weights of one linear layer packed for the native kernels: bfloat16 as they are, or rounded to int8."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from phasewise.ops.native import library
from phasewise.ops.native.abi import LinearCallStruct, RowsStruct, WeightsStruct
from phasewise.ops.native.room import room

KIND = {torch.float32: 0, torch.bfloat16: 1}
WIDTH = 64  # outputs per panel, as in kernels.h
GROUP = 128  # inputs of a row that share a scale in int8, as in linear8.cpp
SLICE = 16 << 20  # bytes of a weight that are packed at a time


class PackedWeights:
    """x [T, in] -> x W^T + bias (+ add) [T, out] for float32 or bfloat16 rows; the result has the rows' dtype.

    Sums are taken in one order, so a row's result does not depend on how many rows there are. bfloat16 weights: the
    products are of bfloat16 (float32 rows are rounded first) and the sums float32. `int8`: weights with one scale per
    output; rows with one for every `GROUP` of their inputs (the last may have fewer), rounded to 255 levels of the
    group's largest magnitude; sums exact within a group, and float32 over groups in their order. There must be a
    `library()`.

    Packing goes by slices of the weight's rows; `done` is told each of them, whose memory may then be let go.
    """

    __slots__ = (
        "_bias", "_column", "_kept", "_multiply", "_rows", "_struct", "address", "inputs", "int8", "nbytes", "outputs"
    )  # fmt: skip

    def __init__(
        self, weight: Tensor, bias: Tensor | None, *, int8: bool = False, done: Callable[[Tensor], None] | None = None
    ) -> None:
        kernels = library()
        assert kernels is not None and weight.dtype in KIND and (int8 or weight.dtype == torch.bfloat16)
        self.outputs, self.inputs = weight.shape
        self.int8 = int8
        self._bias = None if bias is None else bias.float().contiguous()
        width = -(-self.outputs // WIDTH) * WIDTH
        self._column = kernels.words(self.inputs, 4 if int8 else 2) * 4
        packed = room(width * self._column)
        self._kept = packed, torch.empty(self.outputs) if int8 else None
        self.nbytes = self.outputs * (self.inputs + 4 if int8 else self.inputs * 2)
        self.nbytes += 0 if bias is None else bias.nbytes
        self._struct = WeightsStruct(packed=packed, bias=self._bias, outputs=self.outputs, inputs=self.inputs)
        self._struct.point("scale", self._kept[1])
        self.address = self._struct.address
        self._multiply = kernels.linear8 if int8 else kernels.linear
        self._rows = kernels.linear8_rows if int8 else kernels.linear_rows
        step = max(SLICE // (self.inputs * weight.element_size()) // WIDTH, 1) * WIDTH
        for start in range(0, self.outputs, step):
            some = weight[start : start + step]
            self._pack(some.contiguous(), start)
            if done is not None:
                done(some)

    def _pack(self, rows: Tensor, start: int) -> None:
        """Rows `start` .. of the weight, from the beginning of a panel."""
        kernels, threads = library(), torch.get_num_threads()
        assert kernels is not None
        packed, scale = self._kept
        at = packed.data_ptr() + start * self._column
        target = WeightsStruct(packed=at, outputs=len(rows), inputs=self.inputs)
        if scale is not None:
            target.point("scale", scale[start:])
            source = RowsStruct(data=rows, stride=self.inputs, kind=KIND[rows.dtype])
            kernels.linear8_pack(source.address, target.address, threads)
        else:
            kernels.linear_pack(rows.data_ptr(), target.address, threads)

    def __call__(self, x: Tensor, add: Tensor | None = None) -> Tensor:
        """`add` [T, out] is summed into the result within the same kernel."""
        rows, outputs, kind = x.shape[0], self.outputs, KIND[x.dtype]
        y = torch.empty((rows, outputs), dtype=x.dtype)
        if x.stride(1) != 1:
            x = x.contiguous()
        call = LinearCallStruct(weights=self.address, rows=rows, threads=torch.get_num_threads())
        call.x = RowsStruct(data=x.data_ptr(), stride=x.stride(0), kind=kind)
        call.y = RowsStruct(data=y.data_ptr(), stride=outputs, kind=kind)
        if add is not None:
            add = add if add.stride(1) == 1 else add.contiguous()
            call.add = RowsStruct(data=add.data_ptr(), stride=add.stride(0), kind=KIND[add.dtype])
        self._multiply(call.address)
        return y

    def rows(self, which: Tensor) -> Tensor:
        """Rows of the weight in bfloat16, int64 [N] -> [N, in]: the embeddings of a model that ties its head.

        Raises IndexError for a row that there is not.
        """
        index, count = which.contiguous(), which.numel()
        out = torch.empty((count, self.inputs), dtype=torch.bfloat16)
        to = out.data_ptr()
        if self.int8:
            rows = RowsStruct(data=to, stride=self.inputs, kind=KIND[out.dtype])
            to = rows.address
        if self._rows(self.address, index.data_ptr(), count, to, torch.get_num_threads()):
            raise IndexError(f"rows {which.tolist()} are not all among the {self.outputs} of the weight")
        return out

    def dense(self) -> Tensor:
        """The weight [out, in] in bfloat16, a copy; the rounded one if int8."""
        return self.rows(torch.arange(self.outputs))
