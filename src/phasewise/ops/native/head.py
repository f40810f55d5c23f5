"""The head of a language model in one native call: final norm and product, to logits or only to the largest of them."""

from __future__ import annotations

import struct
from array import array

import torch
from torch import Tensor

from phasewise.ops.native import library
from phasewise.ops.native.weights import Packed

CALL = struct.Struct("=7q")  # HeadCall in kernels.h from x on


class Head:
    """RMSNorm by `norm` [d] and `eps`, then the product with `weights`, for rows x [T, d] in bfloat16.

    The normed rows are rounded to bfloat16, the outputs stay the float32 sums they are; a row's result depends on
    that row alone, bit for bit. There must be a `library()`.
    """

    def __init__(self, weights: Packed, norm: Tensor, eps: float) -> None:
        kernels = library()
        assert kernels is not None
        self.weights, self._norm = weights, norm.float().contiguous()
        self._fixed = struct.pack("=qqd", weights.address, self._norm.data_ptr(), eps)
        self._run = kernels.head

    def logits(self, x: Tensor) -> Tensor:
        """float32 [T, V]"""
        out = torch.empty((x.shape[0], self.weights.outputs))
        self._call(x, out.data_ptr(), 0)
        return out

    def best(self, x: Tensor) -> Tensor:
        """Index of the largest logit per row, int64 [T]: `logits(x).argmax(-1)`, without any logits in memory."""
        out = torch.empty(x.shape[0], dtype=torch.int64)
        self._call(x, 0, out.data_ptr())
        return out

    def _call(self, x: Tensor, logits: int, best: int) -> None:
        count, inputs = x.shape
        assert x.dtype == torch.bfloat16 and inputs == self.weights.inputs
        if x.stride()[1] != 1:
            x = x.contiguous()
        step, threads = x.stride()[0], torch.get_num_threads()
        call = array("q", self._fixed + CALL.pack(x.data_ptr(), step, count, self.weights.int8, threads, logits, best))
        self._run(call.buffer_info()[0])
