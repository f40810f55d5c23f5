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


@pytest.mark.parametrize("target", native.TARGETS)
def test_loading_runs_nothing_of_it(target: str) -> None:
    """A library says itself whether a processor runs it, so it is loaded on those that do not: constants that are made
    then, by instructions of its own, would end the process."""
    from elftools.elf.elffile import ELFFile  # comes with auditwheel

    if not native.file(target).exists():
        pytest.skip(f"the {target} kernels were not built")
    with native.file(target).open("rb") as file:
        symbols = [symbol.name for symbol in ELFFile(file).get_section_by_name(".symtab").iter_symbols()]
    assert "layout" in symbols
    assert [name for name in symbols if name.startswith("_GLOBAL__sub_I")] == []
