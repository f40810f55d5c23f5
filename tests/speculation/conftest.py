from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def no_autograd() -> Iterator[None]:
    """The test runs as the engine does."""
    with torch.inference_mode():
        yield
