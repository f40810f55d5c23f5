"""Memory that a training step frees is kept for the next one."""

from __future__ import annotations

import ctypes

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4  # of glibc's malloc.h


def keep_freed_memory() -> bool:
    """Tell the C library never to give memory back, for the rest of this process; False where it cannot be told so.

    A step allocates and frees hundreds of megabytes. Given back, every page of it is cleared by the kernel again, which
    took up to half of a step's time. What is kept is no more than the largest step needs.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # another C library
        return False
    wanted = ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, 2**31 - 1), (M_TOP_PAD, 64 << 20))
    return all(mallopt(what, value) == 1 for what, value in wanted)
