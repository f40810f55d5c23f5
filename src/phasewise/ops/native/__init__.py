"""The CPU kernels in C++ and where they are not to be had: torch's operators then do the same work, more slowly.

Every kernel has a plain twin in torch; `tests/ops/test_native_*.py` hold them together.
"""

from __future__ import annotations

import ctypes
import logging
import os
import sys
from functools import cache
from pathlib import Path

import torch

from phasewise.errors import UserError, near
from phasewise.ops.native import abi

log = logging.getLogger(__name__)

TARGETS = ("amx", "avx512_fma", "avx512", "avx2", "neon_dot", "neon")  # best first
CHOICE = "PHASEWISE_KERNELS"  # in the environment: the target to take, or "none"
SIGNATURES = {
    "panel_bytes": 2,
    "linear_pack": 4,
    "linear_rows": 5,
    "linear": 1,
    "attend": 1,
    "attend_listed": 1,
    "seal": 1,
    "choose_pages": 1,
    "choose_slots": 1,
    "prefill": 1,
    "received": 1,
    "retire": 1,
    "stack": 1,
    "head": 1,
    "suffixes_read": 3,
    "suffixes_place": 1,
    "suffixes_chain": 2,
    "suffixes_match": 1,
    "suffixes_places": 4,
}  # name: number of arguments, all words of 64 bits
COUNTS = (  # these return one
    "panel_bytes", "linear_rows", "stack", "suffixes_chain", "suffixes_match", "suffixes_places",
)  # fmt: skip
POOL = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")


@cache
def library() -> ctypes.CDLL | None:
    """The best kernels for this processor, or those that `CHOICE` names; None, said once in the log, if there are none.

    Raises UserError if those that it names cannot be had.
    """
    choice = os.environ.get(CHOICE, "")
    if choice == "none":
        _say_none(f"{CHOICE}=none")
        return None
    if choice and choice not in TARGETS:
        raise UserError(f"unknown kernels {choice!r} in {CHOICE}. {near(choice, ('none', *TARGETS))}")
    for target in (choice,) if choice else TARGETS:
        kernels = load(target)
        if kernels is not None and (choice or kernels.suits()):
            if not _share_threads(kernels):
                log.warning("native CPU kernels run on one thread: torch's OpenMP runtime was not found")
            return kernels
    built = ", ".join(target for target in TARGETS if file(target).exists())
    if choice:
        raise UserError(
            f"{CHOICE}={choice}: this processor does not run them, or they were not built (built: {built or 'none'}). "
            "Without that variable the best are taken."
        )
    unusable = f"this processor runs none of those built ({built}), unless the log has said something else of them"
    _say_none(unusable if built else "they were not built (is there a C++ compiler?)")
    return None


def _say_none(reason: str) -> None:
    log.warning("no native CPU kernels, torch's operators do their work more slowly: %s", reason)


def load(target: str) -> ctypes.CDLL | None:
    """The kernels compiled for one instruction set, on one thread; None if not built or not for this processor."""
    path = file(target)
    if not path.exists():
        return None
    try:
        kernels = ctypes.CDLL(str(path))
    except OSError as error:
        log.warning("%s does not load: %s", path.name, error)
        return None
    if wrong := _differences(kernels):
        log.warning("%s was built from other sources (%s) and is not used: install phasewise again", path.name, wrong)
        return None
    if not kernels.supported():
        return None
    for name, count in SIGNATURES.items():
        function = getattr(kernels, name)
        function.argtypes = [ctypes.c_int64] * count
        function.restype = ctypes.c_int64 if name in COUNTS else None
    return kernels


def _differences(kernels: ctypes.CDLL) -> str:
    """Functions that a library lacks, or structures that lie otherwise in it; empty where it fits."""
    if missing := [name for name in ("layout", *SIGNATURES) if not hasattr(kernels, name)]:
        return "it lacks " + ", ".join(missing)
    kernels.layout.restype = ctypes.c_char_p
    return ", ".join(abi.mismatch(kernels.layout().decode()))


def file(target: str) -> Path:
    """The path of an instruction set's library, if it was built. Its name bears no Python's ABI: any may load it."""
    return Path(__file__).parent / f"_{target}.so"


def _share_threads(kernels: ctypes.CDLL) -> bool:
    """Hand over the OpenMP runtime that torch has loaded, so that both work on one set of threads."""
    for path in _openmp():
        runtime = ctypes.CDLL(path)
        if all(hasattr(runtime, name) for name in POOL):
            kernels.use_pool(*(ctypes.cast(getattr(runtime, name), ctypes.c_void_p) for name in POOL))
            return True
    return False


def release_threads() -> None:
    """End the OpenMP threads that the calling thread keeps. While two threads of a process keep some, there are more of
    them than cores, and the runtime lets those that wait for one another sleep at every barrier of a step."""
    for path in _openmp():
        try:
            ctypes.CDLL(path).omp_pause_resource_all(1)
        except AttributeError:  # an older one
            log.debug("%s keeps the threads of whoever has used them", path)


def _openmp() -> list[str]:
    """Files of OpenMP runtimes in this process, torch's own first."""
    if not sys.platform.startswith("linux"):
        return []
    lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    paths = {line.split(maxsplit=5)[5] for line in lines if "omp" in line.rpartition("/")[2]}
    home = str(Path(torch.__file__).parent)
    return sorted((p for p in paths if ".so" in p), key=lambda p: not p.startswith(home))
