from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.known.wheelhouse import environment

Place = Callable[[str | Path], Path]


@pytest.fixture
def at(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Place:
    """Makes pip look at a folder or page alone, and models lie in a folder of the test's own, which it returns."""

    def look(links: str | Path) -> Path:
        cache = tmp_path / "cache"
        for name, value in environment(cache, links).items():
            monkeypatch.setenv(name, value)
        return cache

    return look
