"""What scoring evictors share: from scores per (KV head, slot) to the slots that stay."""

from __future__ import annotations

import torch
from torch import Tensor


def retain(scores: Tensor, keep: int, recent: int = 0) -> Tensor:
    """Slots of the `keep` best scores [H, N] per head plus the last `recent` slots after them. -> increasing [H, keep + recent]."""
    heads, n = scores.shape
    best = scores.topk(min(keep, n), -1).indices.sort(-1).values
    last = torch.arange(n, n + recent, device=scores.device).expand(heads, -1)
    return torch.cat((best, last), -1)
