"""Clients that mean harm: each meets an error or a bound, the others are served, and all KV goes back."""

from __future__ import annotations

import contextlib
import re
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from phasewise.llm import LLM
from phasewise.request.params import Params
from tests.serve.running import PATIENCE, Server
from tests.serve.test_errors import COMPLETE, failure

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"


@contextmanager
def others_are_served(server: Server, llm: LLM) -> Iterator[None]:
    """While inside, a stream is under way; it gets what it would have got alone, and nothing is left behind."""
    stream = server.client().completions.create(
        model="tiny", prompt="the fox", temperature=0, max_tokens=300, stream=True, extra_body={"ignore_eos": True}
    )
    text = next(iter(stream)).choices[0].text
    yield
    text += "".join(chunk.choices[0].text for chunk in stream)
    assert text == llm.generate("the fox", Params(max_tokens=300, ignore_eos=True))[0].text
    assert server.health().status_code == 200
    assert server.settled()["phasewise_kv_live_bytes"] == 0
    assert server.errors() == ""


def everything(connection: socket.socket) -> bytes:
    """All that the server says until it closes the connection."""
    connection.settimeout(PATIENCE)
    said = b""
    with contextlib.suppress(ConnectionResetError):
        while part := connection.recv(65536):
            said += part
    return said


def test_a_thousand_connections_opened_and_dropped(server: Server, llm: LLM) -> None:
    with others_are_served(server, llm):
        for i in range(1000):
            with socket.create_connection(("127.0.0.1", server.port)) as connection:
                connection.sendall(HEAD[: i % len(HEAD)])


def test_a_client_that_never_reads(server: Server, llm: LLM) -> None:
    body = b'{"prompt": "the fox", "max_tokens": 2000, "stream": true, "ignore_eos": true, "n": 4}'
    with others_are_served(server, llm), socket.socket() as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        deaf.connect(("127.0.0.1", server.port))
        deaf.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        deadline = time.monotonic() + PATIENCE
        while server.metrics()["phasewise_requests_running"] < 2:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        deaf.shutdown(socket.SHUT_WR)


def test_a_prompt_that_never_ends(server: Server, llm: LLM) -> None:
    with others_are_served(server, llm), socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.settimeout(PATIENCE)
        connection.sendall(HEAD + b'Transfer-Encoding: chunked\r\n\r\n10\r\n{"prompt": "aaaa\r\n')
        chunk, sent = b"100000\r\n" + b"a" * 0x100000 + b"\r\n", 0
        answer = b""
        while not answer and sent < 200:
            connection.sendall(chunk)
            sent += 1
            connection.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                answer = connection.recv(65536)
            connection.settimeout(PATIENCE)
        assert answer.startswith(b"HTTP/1.1 413"), answer[:100]


def test_ten_megabytes_of_prompt(server: Server, llm: LLM) -> None:
    with others_are_served(server, llm):
        assert failure(server.post(COMPLETE, {"prompt": "a" * (10 << 20)}), 413)["code"] == "body_too_large"
        long = failure(server.post(COMPLETE, {"prompt": "the fox " * 900_000}), 400)
        assert long["code"] == "context_length_exceeded" and "7,200,000 characters of prompt" in long["message"]
        spoken = {"messages": [{"role": "user", "content": "the fox " * 900_000}]}
        assert failure(server.post("/v1/chat/completions", spoken), 400)["code"] == "context_length_exceeded"


SMUGGLED = b"GET /v1/models/smuggled HTTP/1.1\r\nHost: x\r\n\r\n"
AMBIGUOUS = {
    "both lengths": b"Content-Length: %d\r\nTransfer-Encoding: chunked\r\n" % (5 + len(SMUGGLED)),
    "both, the other way round": b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n",
    "two lengths": b"Content-Length: 0\r\nContent-Length: 5\r\n",
    "two lengths in one": b"Content-Length: 0, 5\r\n",
    "two codings": b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n",
    "an odd coding": b"Transfer-Encoding: xchunked\r\n",
    "a space before the colon": b"Content-Length : 5\r\n",
    "a folded header": b"X: y\r\n Content-Length: 5\r\nTransfer-Encoding: chunked\r\nContent-Length: 5\r\n",
    "two hosts": b"Host: y\r\nContent-Length: 5\r\n",
}


@pytest.mark.parametrize("name", AMBIGUOUS)
def test_where_a_body_ends_is_never_a_guess(server: Server, name: str) -> None:
    """What a proxy in front may read as one request is never two here."""
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(HEAD + AMBIGUOUS[name] + b"\r\n0\r\n\r\n" + SMUGGLED)
        said = everything(connection)
    assert re.findall(rb"HTTP/1.1 (\d+)", said) in ([b"400"], [b"501"], []), said
    assert b"smuggled" not in said
