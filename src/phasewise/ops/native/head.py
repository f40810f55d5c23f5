"""The head of a language model in one native call: final norm and product, to logits or only to the largest of them."""

from __future__ import annotations

import struct
from array import array

import torch
from torch import Tensor

from phasewise.ops.native import library
from phasewise.ops.native.weights import Packed


class Head:
    """RMSNorm by `norm` [d] and `eps`, then the product with `weights`, for rows x [T, d] in bfloat16.

    The normed rows are rounded to bfloat16, the outputs stay the float32 sums they are; a row's result depends on
    that row alone, bit for bit. There must be a `library()`.
    """

    def __init__(self, weights: Packed, norm: Tensor, eps: float) -> None:
        kernels = library()
        assert kernels is not None
        self.weights, self._norm = weights, norm.float().contiguous()
        self._fixed = struct.unpack("=3q", struct.pack("=qqd", weights.address, self._norm.data_ptr(), eps))
        self._run = kernels.head
        self._last: _Where | None = None

    def logits(self, x: Tensor) -> Tensor:
        """float32 [T, V]"""
        out = torch.empty((x.shape[0], self.weights.outputs))
        self._call(self._where(x), out.data_ptr(), 0)
        return out

    def best(self, x: Tensor) -> list[int]:
        """Index of the largest logit per row, [T]: `logits(x).argmax(-1)`, without any logits in memory."""
        where = self._where(x)
        out = array("q", bytes(8 * where.count))
        self._call(where, 0, out.buffer_info()[0])
        return out.tolist()

    def _where(self, x: Tensor) -> _Where:
        """Steps of as many rows come in the same memory, and a tensor's sizes are slow to ask for."""
        last = self._last
        if last is not None and last.rows is x:
            return last
        self._last = where = _Where(x if x.stride(1) == 1 else x.contiguous(), self.weights.inputs)
        return where

    def _call(self, x: _Where, logits: int, best: int) -> None:
        given = (x.address, x.step, x.count, self.weights.int8, torch.get_num_threads(), logits, best)
        call = array("q", (*self._fixed, *given))
        self._run(call.buffer_info()[0])


class _Where:
    """Rows whose numbers are contiguous, and where they lie."""

    __slots__ = ("address", "count", "rows", "step")

    def __init__(self, rows: Tensor, inputs: int) -> None:
        self.rows, (self.count, width) = rows, rows.shape
        assert rows.dtype == torch.bfloat16 and width == inputs
        self.address, self.step = rows.data_ptr(), rows.stride(0)
