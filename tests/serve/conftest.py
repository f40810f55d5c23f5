from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from phasewise.llm import LLM
from tests.serve.playing import checkpoint
from tests.serve.running import Server
from tests.serve.tiny_chat import chat_checkpoint


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """The server most tests share; each must leave it as it was."""
    with Server() as running:
        yield running


@pytest.fixture(scope="session")
def narrow() -> Iterator[Server]:
    """A slow server with little KV, room for three requests, and a model without a chat template."""
    with Server(chat=False, queue=1, limits={"max_running": 2, "kv_bytes": 400_000}, faults={"pause": 0.01}) as running:
        yield running


@pytest.fixture(scope="session")
def client(server: Server) -> openai.OpenAI:
    return server.client()


@pytest.fixture(scope="session")
def llm() -> LLM:
    """The same model in this process."""
    return LLM(str(chat_checkpoint()))


# ---- servers that answer what messages say (playing.py)
@pytest.fixture(scope="session")
def hermes() -> Iterator[Server]:
    """A server that answers what messages say, with a template in the manner of Hermes that shows no reasoning."""
    with Server(model=checkpoint("hermes"), faults={"plays": True}) as running:
        yield running


@pytest.fixture(scope="session")
def thinking() -> Iterator[Server]:
    """The same with reasoning."""
    with Server(model=checkpoint("thinking"), faults={"plays": True}) as running:
        yield running


@pytest.fixture(scope="session")
def mistral() -> Iterator[Server]:
    """The same with calls in the manner of Mistral, whose words are special tokens."""
    with Server(model=checkpoint("mistral"), faults={"plays": True}) as running:
        yield running
