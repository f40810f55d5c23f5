"""RMSNorm in float32, and the two ways families normalise queries and keys."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x` [..., n] over its root mean square, times `weight` [n]; computed in float32, returned in x's dtype.

    A float32 weight beside a 16-bit `x` is meant: Gemma's 1 + w would lose its small w in 16 bits.
    """
    if weight.dtype == x.dtype:
        return F.rms_norm(x, weight.shape, weight, eps)
    return F.rms_norm(x.float(), weight.shape, weight, eps).to(x.dtype)


@dataclass(frozen=True, eq=False)
class RMSNorm:
    """`rms_norm` with its weight; the result is always a fresh tensor."""

    weight: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


@dataclass(frozen=True, eq=False)
class HeadNorm:
    """Queries and keys [T, Hq + Hkv, D], each head by itself; `weight` [Hq + Hkv, D] repeats q's and k's."""

    weight: Tensor
    eps: float

    def __call__(self, qk: Tensor) -> Tensor:
        dtype = self.weight.dtype
        y = F.rms_norm(qk if qk.dtype == dtype else qk.float(), qk.shape[-1:], None, self.eps)
        return y.mul_(self.weight).to(qk.dtype)


@dataclass(frozen=True, eq=False)
class FullNorm:
    """Queries and keys [T, Hq + Hkv, D]: all of q's heads at once, then all of k's (OLMo 2)."""

    q_weight: Tensor  # [Hq * D]
    k_weight: Tensor  # [Hkv * D]
    eps: float

    @property
    def weight(self) -> Tensor:
        """[(Hq + Hkv) * D]"""
        return torch.cat((self.q_weight, self.k_weight))

    def __call__(self, qk: Tensor) -> Tensor:
        split = (self.q_weight.shape[0], self.k_weight.shape[0])
        q, k = qk.flatten(1).split_with_sizes(split, -1)
        joined = torch.cat((rms_norm(q, self.q_weight, self.eps), rms_norm(k, self.k_weight, self.eps)), -1)
        return joined.view(qk.shape)
