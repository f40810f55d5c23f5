"""The instruction sets whose kernels this machine has built and runs."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import ModuleType
from typing import Any

import pytest
import torch

from phasewise.ops import native

_KERNELS = {target: kernels for target in native.TARGETS if (kernels := native.load(target)) is not None}
HERE = list(_KERNELS)
OWN = next((target for target, kernels in _KERNELS.items() if kernels.suits()), None)  # what is taken here
# the cases of a test; those of other sets than the machine's own are left to `make test-rest`
EACH = [target if target == OWN else pytest.param(target, marks=pytest.mark.thorough) for target in HERE]
_OTHERS = [target for target in HERE if target != OWN]
# the values of `sets` for a test that holds several instruction sets to what it computes once
SETS = [pytest.param([OWN] if OWN else [], id="own"), pytest.param(_OTHERS, id="others", marks=pytest.mark.thorough)]
NATIVE = pytest.mark.skipif(not HERE, reason="there are no native kernels here")


@cache
def _loaded(target: str) -> ctypes.CDLL:
    native._share_threads(_KERNELS[target])
    return _KERNELS[target]


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


def alike(target: str | None) -> bool:
    """Whether attention of few rows and of many sums alike in bfloat16. The matrix unit has an order of its own."""
    return target is not None and target != "amx"


def in_pairs(module: ModuleType) -> bool:
    """Whether the kernels that a module calls while they are `running` round what meets packed levels to bfloat16."""
    return "avx512" in _KERNELS and module.library() is _KERNELS["avx512"]


def drawn(quick: int, rest: int = 2) -> list[Any]:
    """Values of a number and of `sets` for a property test: so many draws by the kernels that this machine takes, then
    `rest` others by those of its other instruction sets, which are left to `make test-rest`."""
    (own,), (others,) = (sets.values for sets in SETS)
    later = [pytest.param(quick + i, others, id=f"{quick + i}-others", marks=pytest.mark.thorough) for i in range(rest)]
    return [*(pytest.param(i, own, id=f"{i}-own") for i in range(quick)), *later]
