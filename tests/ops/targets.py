"""The instruction sets whose kernels this machine has built and runs."""

from __future__ import annotations

import torch

from phasewise.ops import native

HERE = [target for target in native.TARGETS if native.load(target) is not None]


def by_levels(target: str, dim: int, kind: torch.dtype) -> bool:
    """Whether rows of int8 levels are read as they are. Elsewhere they are decoded, which rounds them in bfloat16."""
    return target in ("amx", "avx512") and kind == torch.bfloat16 and dim % 32 == 0
