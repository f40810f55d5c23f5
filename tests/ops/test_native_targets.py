"""One line for each instruction set: the tests of kernels are taken over those that run here, and no others."""

from __future__ import annotations

import pytest

from phasewise.ops import native
from tests.ops.targets import HERE


@pytest.mark.parametrize("target", native.TARGETS)
def test_kernels_are_tested_here(target: str) -> None:
    if target not in HERE:
        pytest.skip(f"the {target} kernels were not built, or do not run on this processor")
    assert native.load(target) is not None
