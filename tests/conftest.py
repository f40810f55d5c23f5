"""Options of the test suite."""

from __future__ import annotations

import pytest
from hypothesis import settings

settings.register_profile("unhurried", deadline=None)  # beside a busy core an example takes as long as it takes
settings.load_profile("unhurried")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--all-pairs",
        action="store_true",
        help="laws over every scheduler, placement and way to decode, instead of rows in which every two methods meet",
    )
