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


class Memory:
    """A bfloat16 weight of this size, which can be read again at any time: some machines read at two speeds, and change
    between them within minutes."""

    def __init__(self, size: tuple[int, int] = LARGE) -> None:
        large = torch.empty(size, dtype=torch.bfloat16).fill_(0.5)
        self.bytes = large.nbytes
        self._ways: list[Callable[[], object]] = [lambda: large.view(torch.float32).sum()]
        if native.library() is not None:
            packed, row = Linear(large), torch.ones(1, size[1], dtype=torch.bfloat16)
            self._ways.append(lambda: packed(row))

    def rate(self, rounds: int = 2) -> float:
        """Bytes per second: by torch's sum, and by our own product with one row."""
        return max(self.bytes / best(way, rounds) for way in self._ways)


def reading(rounds: int, size: tuple[int, int] = LARGE) -> float:
    """Bytes per second, measured once."""
    return Memory(size).rate(rounds)
