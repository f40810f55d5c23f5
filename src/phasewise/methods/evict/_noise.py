"""Gumbel noise for many (row, key, head) at once that depends on their numbers alone: counters, no state."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

LOW = 0xFFFFFFFF
ROUNDS = 10


def philox(counter: Sequence[Tensor], key: Sequence[Tensor]) -> list[Tensor]:
    """Philox 4x32, ten rounds (Salmon et al., 2011), elementwise: four words of counter and two of key, int64 in
    [0, 2**32) that broadcast, give four words. (64 bits wrap around as they should, signed or not.)"""
    a, b, c, d = counter
    left, right = key
    for _ in range(ROUNDS):
        p, q = a * 0xD2511F53, c * 0xCD9E8D57
        a, b, c, d = (q >> 32 & LOW) ^ b ^ left, q & LOW, (p >> 32 & LOW) ^ d ^ right, p & LOW
        left, right = left + 0x9E3779B9 & LOW, right + 0xBB67AE85 & LOW
    return [a, b, c, d]


def gumbel(seeds: Tensor, rows: Tensor, keys: Tensor, heads: Tensor, group: int, layer: int) -> Tensor:
    """Independent draws of Gumbel(0, 1), float32 [h, G, r, n], of seeds [r], positions rows [r] and keys [1 | h, n],
    and KV heads by number [h]. A draw depends on its own numbers, whichever others are asked for."""
    blocks = -(-group // 4)  # query heads share a counter, four by four
    which = heads[:, None] * blocks + torch.arange(blocks, device=heads.device)  # [h, blocks]
    counter = (
        keys[:, None, None],  # [1 | h, 1, 1, n]
        rows[None, None, :, None],
        which[:, :, None, None],
        torch.full((1, 1, 1, 1), layer, device=heads.device),
    )
    seed = seeds[None, None, :, None]
    words = philox(counter, (seed & LOW, seed >> 32 & LOW))
    drawn = torch.stack(words, 2).flatten(1, 2)[:, :group]  # [h, G, r, n]
    uniform = ((drawn >> 9).float() + 0.5) * 2.0**-23  # never 0 or 1, exactly
    return -(-uniform.log()).log()
