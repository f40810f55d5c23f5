"""What scoring evictors share: from scores per (KV head, slot) to the slots that stay."""

from __future__ import annotations

import torch
from torch import Tensor


def retain(scores: Tensor, keep: int, recent: int = 0) -> Tensor:
    """Slots of the `keep` best scores [H, N] per head, and the `recent` slots after all of them.

    -> increasing [H, min(keep, N) + recent]. Of equal scores the earlier slot stays, on every device.
    """
    heads, n = scores.shape
    best = scores.sort(stable=True, dim=-1, descending=True).indices[:, :keep].sort(-1).values
    last = torch.arange(n, n + recent, device=scores.device).expand(heads, -1)
    return torch.cat((best, last), -1)
