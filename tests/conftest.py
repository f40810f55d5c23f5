"""Options of the test suite."""

from __future__ import annotations

from contextlib import suppress

import pytest

with suppress(
    ImportError
):  # before anything can import Python's own distutils, which setuptools then refuses to replace
    import setuptools  # noqa: F401


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--all-pairs",
        action="store_true",
        help="laws over every scheduler, placement and way to decode, instead of rows in which every two methods meet",
    )
