"""How fast this machine reads memory: the best that anything reaches here, so that nobody has gone faster."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from phasewise.ops import native
from phasewise.ops.linear import Linear

LARGE = (1 << 16, 4096)  # a weight far larger than any cache: 512 MiB in bfloat16


def best(run: Callable[[], object], rounds: int) -> float:
    """Seconds of the fastest of several runs."""
    run()
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


def reading(rounds: int, size: tuple[int, int] = LARGE) -> float:
    """Bytes per second, of a bfloat16 weight of this size: by torch's sum, and by our own product with one row."""
    large = torch.empty(size, dtype=torch.bfloat16).fill_(0.5)
    rates = [large.nbytes / best(lambda: large.view(torch.float32).sum(), rounds)]
    if native.library() is not None:
        packed, row = Linear(large), torch.ones(1, size[1], dtype=torch.bfloat16)
        del large
        rates.append(packed.nbytes / best(lambda: packed(row), rounds))
    return max(rates)
