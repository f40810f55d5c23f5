"""What pages of cached rows promise a query, and which it reads: the plain twin of `ops.native.listed.choose`."""

from __future__ import annotations

import torch
from torch import Tensor

from phasewise.ops.native.listed import Pages


def split(q: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """q [R, h * G, D] -> its positive and its negative part, float32 [h, G, R, D]."""
    grouped = _grouped(q, heads)
    return grouped.clamp_min(0), grouped.clamp_max(0)


def promises(q: Tensor, low: Tensor, high: Tensor | None) -> Tensor:
    """The most that q [R, h * G, D] times a key within the bounds [h, P, D] can be, or without high what q times low
    is: the largest over the group, float32 [h, R, P]."""
    if high is None:
        each = _grouped(q, low.shape[0]).flatten(1, 2) @ low.float().mT  # [h, G * R, P]
    else:
        up, down = split(q, low.shape[0])
        each = up.flatten(1, 2) @ high.float().mT + down.flatten(1, 2) @ low.float().mT
    heads, pages = low.shape[:2]
    best: Tensor = each.view(heads, q.shape[1] // heads, q.shape[0], pages).amax(1)
    return best


def chosen(pages: Pages) -> Tensor:
    """What `listed.choose` lists for one row."""
    value = promises(pages.q, pages.low, pages.high)[:, 0]  # [h, P]
    best = value.sort(descending=True, stable=True).indices[:, : pages.chosen].sort().values
    slots = (best[:, :, None] * pages.size + torch.arange(pages.size, device=best.device)).flatten(1)
    last = torch.arange(pages.own, pages.n, device=best.device).expand(len(best), -1)
    return torch.cat((slots, last), 1)[:, None].int()


def _grouped(q: Tensor, heads: int) -> Tensor:
    return q.float().view(q.shape[0], heads, -1, q.shape[2]).permute(1, 2, 0, 3)
