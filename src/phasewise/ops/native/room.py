"""Memory for packed weights: slices of large blocks on huge pages, where the processor reads ahead a tenth faster."""

from __future__ import annotations

import ctypes
import sys
import threading

import torch
from torch import Tensor

PAGE = 2 << 20  # of a huge page
BLOCK = 128 << 20  # its last page stays half empty on average; what is not written takes no memory
ADVISE_HUGE = 14  # MADV_HUGEPAGE

_lock = threading.Lock()
_block = torch.empty(0, dtype=torch.uint8)
_used = 0


def room(nbytes: int) -> Tensor:
    """uint8 [nbytes], aligned to a cache line. The block goes when the last slice of it does."""
    global _block, _used
    with _lock:
        if _used + nbytes > _block.shape[0]:
            _block, _used = _new_block(max(nbytes, BLOCK)), 0
        start, _used = _used, _used + -(-nbytes // 64) * 64
        return _block[start : start + nbytes]


def let_go() -> None:
    """Keep no block for the next weights: the last one goes with its slices, and what the allocator holds goes back."""
    global _block, _used
    with _lock:
        _block, _used = torch.empty(0, dtype=torch.uint8), 0
    trim()


def trim() -> None:
    """Memory that was let go leaves the process, where its allocator can do that."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(ctypes.c_size_t(0))


def _new_block(nbytes: int) -> Tensor:
    nbytes = -(-nbytes // PAGE) * PAGE
    raw = torch.empty(nbytes + PAGE, dtype=torch.uint8)
    skip = -raw.data_ptr() % PAGE
    block = raw[skip : skip + nbytes]
    if sys.platform.startswith("linux"):
        libc = ctypes.CDLL(None)
        libc.madvise(ctypes.c_void_p(block.data_ptr()), ctypes.c_size_t(nbytes), ADVISE_HUGE)  # advice: may be refused
        trim()  # weights that were packed and let go leave the process
    return block
