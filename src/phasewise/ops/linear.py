"""One linear layer: a plain twin (`F.linear`), and weights packed for oneDNN where that reads memory faster."""

from __future__ import annotations

import logging
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

log = logging.getLogger(__name__)


class Linear:
    """x [T, in] -> x W^T + bias (+ add) [T, out], for a weight [out, in] and a bias [out] or None.

    bfloat16 weights on a CPU are packed into oneDNN's own layout and the plain copy is let go, unless `packed` is
    False. The result is always a fresh tensor. `nbytes` counts the parameters, whatever their layout.
    """

    __slots__ = ("_bias", "_packed", "_weight", "inputs", "nbytes", "outputs")

    def __init__(self, weight: Tensor, bias: Tensor | None = None, *, packed: bool | None = None) -> None:
        self.outputs, self.inputs = weight.shape
        self.nbytes = weight.nbytes + (0 if bias is None else bias.nbytes)
        self._bias = bias
        wanted = weight.device.type == "cpu" and weight.dtype == torch.bfloat16 if packed is None else packed
        self._packed = wanted and _can_pack(weight.dtype)
        self._weight = _pack(weight) if self._packed else weight

    def __call__(self, x: Tensor, add: Tensor | None = None) -> Tensor:
        """`add` [T, out] is summed into the result; in the packed form within the same kernel."""
        if not self._packed:
            y = F.linear(x, self._weight, self._bias)
            return y if add is None else y.add_(add)
        return _multiply(x, self._weight, self._bias, add)

    @property
    def packed(self) -> bool:
        return self._packed

    def dense(self) -> Tensor:
        """The weight [out, in] as a plain tensor; a copy when packed."""
        return self._weight.to_dense() if self._packed else self._weight


def _pack(weight: Tensor) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())
    return packed


def _multiply(x: Tensor, packed: Tensor, bias: Tensor | None, add: Tensor | None) -> Tensor:
    y: Tensor
    if add is None:
        y = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    else:
        y = torch.ops.mkldnn._linear_pointwise.binary(x, add, packed, bias, "add")
    return y


@cache
def _can_pack(dtype: torch.dtype) -> bool:
    """Whether oneDNN packs and multiplies weights of this type here; says so once in the log when it does not."""
    try:
        x = torch.zeros(1, 16, dtype=dtype)
        _multiply(x, _pack(torch.zeros(16, 16, dtype=dtype)), None, x)
    except (AttributeError, RuntimeError) as error:  # NotImplementedError is a RuntimeError
        log.warning("oneDNN cannot pack %s weights here, using plain linear layers: %s", dtype, error)
        return False
    return True
