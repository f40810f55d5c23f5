"""Settings of a training process: freed memory is kept for the next step, numbers next to nothing are zero."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

import torch

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4  # of glibc's malloc.h


def keep_freed_memory() -> bool:
    """Tell the C library not to give memory back by itself while this process lives; False where that cannot be said.

    A step allocates and frees hundreds of megabytes. Given back, every page of it is cleared by the kernel again, which
    took up to half of a step's time. Steps of different sizes leave gaps, which `give_back` returns.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # another C library
        return False
    wanted = ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, 2**31 - 1), (M_TOP_PAD, 64 << 20))
    return all(mallopt(what, value) == 1 for what, value in wanted)


def give_back() -> None:
    """Return what is free now, gaps included."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))


@contextmanager
def tiny_numbers_as_zero() -> Iterator[bool]:
    """Count float32 numbers below 1.2e-38 as zero, in this thread until the end and in those that it starts meanwhile;
    gives False where that cannot be.

    Enter it before the first large operation starts torch's workers. Attention that is sure of itself is full of such
    probabilities, and an Intel core takes a hundred times as long for a product with one: a step can take three times
    as long for it.
    """
    already = not float(torch.tensor(1e-20) * 1e-20)
    try:
        yield torch.set_flush_denormal(True)
    finally:
        torch.set_flush_denormal(already)
