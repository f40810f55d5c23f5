"""Cases of tests that are marked by `axes.over`."""

from __future__ import annotations

import pytest

from tests import seeds
from tests.laws.axes import sampled


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    cases = getattr(metafunc.function, "cases", None)
    if cases is not None:
        rows, name, most = cases
        full = metafunc.config.getoption("--all-pairs")
        found = rows(full)
        if most and not full:
            found = sampled(found, most, seeds.turn())
        metafunc.parametrize("case", found, ids=[name(row) for row in found])
