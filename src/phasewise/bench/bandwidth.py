"""Measures how fast this machine reads memory: the best rate that anything reaches here."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

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


class StreamedWeight:
    """A bfloat16 weight of this size, which can be read again at any time: some machines read at two speeds, and change
    between them within minutes."""

    def __init__(self, size: tuple[int, int] = LARGE) -> None:
        self._large: Tensor | Linear = torch.empty(size, dtype=torch.bfloat16).fill_(0.5)
        self._row, self.bytes = torch.ones(1, size[1], dtype=torch.bfloat16), self._large.nbytes
        if native.library() is not None:
            self._large = Linear(self._large)

    def rate(self, rounds: int = 3) -> float:
        """Bytes per second: by our own product with one row, or by torch's sum where there are no kernels."""
        return self.bytes / best(self._read, rounds)

    def _read(self) -> object:
        return self._large(self._row) if isinstance(self._large, Linear) else self._large.view(torch.float32).sum()


def reading(rounds: int, size: tuple[int, int] = LARGE) -> float:
    """Bytes per second, measured once."""
    return StreamedWeight(size).rate(rounds)
