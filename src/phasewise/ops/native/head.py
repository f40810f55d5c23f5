"""The head of a language model in one native call: final norm and product, to logits or only to the largest of them."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from phasewise.ops.native import library
from phasewise.ops.native.abi import HeadCallStruct, NormStruct
from phasewise.ops.native.weights import PackedWeights


class Head:
    """RMSNorm by `norm` [d] and `eps`, then the product with `weights`, for rows x [T, d] in bfloat16; with a `cap`, y
    becomes cap tanh(y / cap).

    The normed rows are rounded to bfloat16, the outputs stay the float32 sums they are; a row's result depends on
    that row alone, bit for bit. There must be a `library()`. A call takes as many threads as torch has when its `x` is
    another than that of the call before.
    """

    def __init__(self, weights: PackedWeights, norm: Tensor, eps: float, cap: float | None = None) -> None:
        kernels = library()
        assert kernels is not None
        self.weights, self._norm, self._cap = weights, NormStruct(weight=norm.float().contiguous(), eps=eps), cap or 0.0
        self._run = kernels.head
        self._last: _Ready | None = None

    def logits(self, x: Tensor) -> Tensor:
        """float32 [T, V]"""
        out = torch.empty((x.shape[0], self.weights.outputs))
        self._call(self._ready(x), out.data_ptr(), 0)
        return out

    def best(self, x: Tensor, masks: Sequence[Tensor | None] = ()) -> list[int]:
        """Index of the largest logit per row, [T]: `logits(x).argmax(-1)`, without any logits in memory.

        `masks`, none or one per row: int32 [V / 32], of which bit i of word j says that output 32 j + i counts. -1
        where that leaves nothing above -inf.
        """
        ready = self._ready(x)
        each = array("q", [0 if mask is None else mask.data_ptr() for mask in masks])
        self._call(ready, 0, ready.best_at, each.buffer_info()[0] if masks else 0)
        return ready.best.tolist()

    def _ready(self, x: Tensor) -> _Ready:
        """Steps of as many rows come in the same memory, and a tensor's sizes are slow to ask for."""
        last = self._last
        if last is not None and last.rows is x:
            return last
        rows = x if x.stride(1) == 1 else x.contiguous()
        count, width = rows.shape
        assert rows.dtype == torch.bfloat16 and width == self.weights.inputs
        call = HeadCallStruct(
            weights=self.weights.address, norm=self._norm, cap=self._cap, x=rows.data_ptr(), x_row=rows.stride(0),
            rows=count, threads=torch.get_num_threads(),
        )  # fmt: skip
        self._last = ready = _Ready(rows, call)
        return ready

    def _call(self, ready: _Ready, logits: int, best: int, masks: int = 0) -> None:
        call = ready.call
        call.logits, call.best, call.masks = logits, best, masks
        self._run(ready.address)


class _Ready:
    """A call for rows whose numbers are contiguous, but for where the results go; and room for the largest logits."""

    __slots__ = ("address", "best", "best_at", "call", "rows")

    def __init__(self, rows: Tensor, call: HeadCallStruct) -> None:
        self.rows, self.call, self.address = rows, call, call.address
        self.best = array("q", bytes(8 * rows.shape[0]))
        self.best_at = self.best.buffer_info()[0]
