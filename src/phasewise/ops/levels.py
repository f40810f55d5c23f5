"""Products with weights of few bits, in plain torch: what `native/levels.py` computes, to the rounding of its sums."""

from __future__ import annotations

import torch
from torch import Tensor


def rounded(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Rows [T, n] in whole steps, float64 [T, n / group, group], and what a step is worth, float32 [T, n / group, 1].

    A step is 1 / 127 of the largest magnitude of `group` consecutive numbers; below 1e-35 that is taken for 0.
    """
    parts = x.float().reshape(len(x), -1, group)
    top = parts.abs().amax(2, keepdim=True)
    inverse = torch.where(top >= 1e-35, torch.tensor(127.0) / top, 0.0)  # a tensor: 127 / top would round twice
    return (parts.double() * inverse.double()).round(), top / 127


def multiply(x: Tensor, weight: Tensor, group: int, *, as_bytes: bool) -> Tensor:
    """Rows [T, in] times a weight float [out, in], in float64 [T, out].

    Rows are rounded to bfloat16, or `as_bytes` with one scale for every `group` inputs.
    """
    if not as_bytes:
        return x.bfloat16().double() @ weight.double().T
    steps, worth = rounded(x, group)
    return (steps * worth.double()).reshape(x.shape) @ weight.double().T
