from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.serve.playing import checkpoint
from tests.serve.running import Server


@pytest.fixture(scope="package")
def hermes() -> Iterator[Server]:
    """A server that answers what messages say, and what a grammar leaves where they say nothing."""
    with Server(model=checkpoint("hermes"), faults={"plays": True}) as running:
        yield running
