from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.serve.playing import checkpoint
from tests.serve.running import Server


@pytest.fixture(scope="package")
def hermes() -> Iterator[Server]:
    """A server that answers what messages say, with a template in the manner of Hermes that shows no reasoning."""
    with Server(model=checkpoint("hermes"), faults={"plays": True}) as running:
        yield running


@pytest.fixture(scope="package")
def thinking() -> Iterator[Server]:
    """The same with reasoning."""
    with Server(model=checkpoint("thinking"), faults={"plays": True}) as running:
        yield running


@pytest.fixture(scope="package")
def mistral() -> Iterator[Server]:
    """The same with calls in the manner of Mistral, whose words are special tokens."""
    with Server(model=checkpoint("mistral"), faults={"plays": True}) as running:
        yield running
