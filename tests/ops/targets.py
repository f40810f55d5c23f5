"""The instruction sets whose kernels this machine has built and runs."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import ModuleType

import pytest
import torch

from phasewise.ops import native

HERE = [target for target in native.TARGETS if native.load(target) is not None]
NATIVE = pytest.mark.skipif(not HERE, reason="there are no native kernels here")


@cache
def _loaded(target: str) -> ctypes.CDLL:
    kernels = native.load(target)
    assert kernels is not None
    native._share_threads(kernels)
    return kernels


@contextmanager
def running(target: str, *modules: ModuleType) -> Iterator[str]:
    """These modules call the kernels of an instruction set meanwhile, which is said of what fails. A test that takes
    one after the other within computes once what all of them have to give."""
    kernels = _loaded(target)
    with pytest.MonkeyPatch.context() as patch:
        for module in modules:
            patch.setattr(module, "library", lambda: kernels)
        try:
            yield target
        except Exception as error:
            error.add_note(f"with the kernels for {target}")
            raise


def by_levels(target: str, dim: int, kind: torch.dtype) -> bool:
    """Whether rows of int8 levels are read as they are. Elsewhere they are decoded, which rounds them in bfloat16."""
    return target in ("amx", "avx512_fma", "avx512") and kind == torch.bfloat16 and dim % 32 == 0
