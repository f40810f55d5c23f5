from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from phasewise.llm import LLM
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
