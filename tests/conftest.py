"""Options of the test suite."""

from __future__ import annotations

import pytest
from hypothesis import settings

settings.register_profile("unhurried", deadline=None)  # beside a busy core an example takes as long as it takes
settings.load_profile("unhurried")

# Files that take longest: a worker that is given one of them last keeps all others waiting.
LONGEST = (
    "laws/test_distribution.py", "laws/test_methods.py", "reproduce/test_systems.py", "laws/test_recipes.py",
    "laws/test_kv_methods.py", "test_wheel.py", "cluster/test_soak.py",
)  # fmt: skip


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--all-pairs",
        action="store_true",
        help="laws over every scheduler, placement and way to decode, instead of rows in which every two methods meet",
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first, the longest of them foremost; all else in its order."""

    def place(item: pytest.Item) -> int:
        path = item.path.as_posix()
        return next((i for i, name in enumerate(LONGEST) if path.endswith(f"/tests/{name}")), len(LONGEST))

    items.sort(key=place)
