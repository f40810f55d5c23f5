"""One check of what all attention kernels take."""

from __future__ import annotations

import torch
from torch import Tensor

KIND = {torch.float32: 0, torch.bfloat16: 1}  # numbers that they compute with, as they name them
MOST_DIM = 256  # of a head, as in attention.cpp and prefill.cpp
MOST_RANK, MOST_APART = 16, 64  # of packed blocks, as in mended.h


def fits(q: Tensor, k: Tensor, v: Tensor, scales: tuple[Tensor, Tensor] | None) -> bool:
    """True if the kernels, where there are any, take q [R, Hq, D] and k, v [H, N, D]: of a known dtype (k and v int8,
    if they have `scales`) on the CPU, with heads of ordinary size and contiguous rows of keys and values."""
    kept = q.dtype if scales is None else torch.int8
    return (
        q.dtype in KIND
        and k.dtype == kept
        and v.dtype == kept
        and q.device.type == "cpu"
        and q.shape[2] <= MOST_DIM
        and k.stride(2) == 1
        and v.stride(2) == 1
    )
