"""Cases of tests that are marked by `axes.over`."""

from __future__ import annotations

import pytest


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    cases = getattr(metafunc.function, "cases", None)
    if cases is not None:
        rows, name = cases
        found = rows(metafunc.config.getoption("--all-pairs"))
        metafunc.parametrize("case", found, ids=[name(row) for row in found])
