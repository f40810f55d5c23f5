"""Memory for packed weights: slices of large blocks on huge pages, where the processor reads ahead a tenth faster; and
what a process gives back."""

from __future__ import annotations

import ctypes
import re
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

PAGE = 2 << 20  # of a huge page
BLOCK = 128 << 20  # its last page stays half empty on average; what is not written takes no memory
ADVISE_HUGE, ADVISE_GONE = 14, 4  # MADV_HUGEPAGE, MADV_DONTNEED
MAPPINGS = Path("/proc/self/smaps")
MAPPING = re.compile(r"(?P<start>[0-9a-f]+)-(?P<stop>[0-9a-f]+) (?P<may>\S+) \S+ \S+ \S+ +(?P<path>/.*)?")

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


def give_back_code() -> int:
    """Unmap the pages of code that have been run so far, and return the bytes that leave the process, 0 without Linux.

    Importing torch runs some 60 MB of code that is never run again. What is still needed comes back page by page from
    the system's cache of files, when it is run. Code that was written to in memory, by a debugger say, stays.
    """
    if not sys.platform.startswith("linux"):
        return 0
    libc, bytes_gone = ctypes.CDLL(None), 0
    for start, stop, resident in list(_code()):
        if not libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), ADVISE_GONE):
            bytes_gone += resident
    return bytes_gone


def _code() -> Iterator[tuple[int, int, int]]:
    """Where unaltered code of files is mapped: first address, the one behind the last, resident bytes."""
    span, sizes = None, dict[str, int]()
    for line in MAPPINGS.read_text(encoding="utf-8", errors="replace").splitlines():
        if found := MAPPING.match(line):
            code = found["path"] and found["may"] == "r-xp"
            span, sizes = (int(found["start"], 16), int(found["stop"], 16)) if code else None, {}
        elif span is not None and line.endswith(" kB"):
            name, _, size = line.removesuffix(" kB").partition(":")
            sizes[name] = int(size) << 10
        elif span is not None and not sizes.get("Anonymous"):  # the flags, which are a mapping's last line
            yield *span, sizes.get("Rss", 0)


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
