"""Parts of a stream that go straight to the socket: in order, whole, and only where they can."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest

from phasewise.serve.notifier import Notifier
from tests.serve.running import PATIENCE, Server

LONG: dict[str, Any] = {"model": "tiny", "prompt": "the fox", "temperature": 0, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server() as server:
        yield server


def ask(server: Server, version: str, **fields: Any) -> tuple[bytes, bytes]:
    """Head and body of a streamed answer, as they come over the wire."""
    body = json.dumps({**LONG, **fields}).encode()
    head = f"POST /v1/completions HTTP/{version}\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE) as connection:
        connection.sendall(head.encode() + body)
        parts = []
        while part := connection.recv(1 << 16):
            parts.append(part)
    first, _, rest = b"".join(parts).partition(b"\r\n\r\n")
    return first, rest


def without_chunks(body: bytes) -> bytes:
    """A body in chunks as what it carries; fails where a length is wrong, or the end is missing."""
    parts, at = [], 0
    while True:
        end = body.index(b"\r\n", at)
        size = int(body[at:end], 16)
        part, after = body[end + 2 : end + 2 + size], body[end + 2 + size : end + 4 + size]
        assert len(part) == size and after == b"\r\n"
        if not size:
            assert end + 4 == len(body)
            return b"".join(parts)
        parts.append(part)
        at = end + 4 + size


def told(stream: bytes) -> str:
    """The text of a stream."""
    lines = [line.removeprefix("data: ") for line in stream.decode().split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return "".join(json.loads(line)["choices"][0]["text"] for line in lines[:-1])


def test_the_same_text_in_chunks_and_to_a_client_that_knows_none(server: Server) -> None:
    whole = server.post("/v1/completions", {**LONG, "stream": False, "max_tokens": 60}).json()["choices"][0]["text"]
    head, body = ask(server, "1.1", max_tokens=60)
    assert b"transfer-encoding: chunked" in head.lower()
    assert told(without_chunks(body)) == whole
    head, body = ask(server, "1.0", max_tokens=60)
    assert b"transfer-encoding" not in head.lower()
    assert told(body) == whole


def test_a_slow_reader_gets_everything_in_order(server: Server) -> None:
    """Its socket fills up: what waits then goes the usual way, behind what was written before."""
    usage = {"continuous_usage_stats": True, "include_usage": True}
    fields: dict[str, Any] = {"max_tokens": 200, "n": 16, "stream_options": usage}
    body = json.dumps({**LONG, **fields}).encode()
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(PATIENCE)
        connection.connect(("127.0.0.1", server.port))
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n")
        connection.sendall(b"Content-Length: %d\r\n\r\n" % len(body) + body)
        ends = time.monotonic() + PATIENCE
        while server.metrics()["phasewise_requests_running"] == 0:
            assert time.monotonic() < ends
        while server.metrics()["phasewise_requests_running"] > 0:  # it is answered, and nothing has been read
            assert time.monotonic() < ends
        parts = []
        while part := connection.recv(1 << 12):
            parts.append(part)
    stream = without_chunks(b"".join(parts).partition(b"\r\n\r\n")[2]).decode()
    counted = [int(n) for n in re.findall(r'"completion_tokens": (\d+)', stream)]
    assert counted == sorted(counted) and counted[-1] == 16 * 200
    texts: dict[int, str] = {}
    for line in stream.split("\n\n")[:-2]:
        for choice in json.loads(line.removeprefix("data: "))["choices"]:
            texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    whole = server.post("/v1/completions", {**LONG, "stream": False, "max_tokens": 200}).json()["choices"][0]["text"]
    assert texts == dict.fromkeys(range(16), whole)


def test_a_bell_wakes_one_task_or_is_heard_at_once() -> None:
    async def main() -> None:
        bell, heard = Notifier(), list[str]()
        bell.ring()
        await bell.wait()  # rung before

        async def task() -> None:
            await bell.wait()
            heard.append("task")

        waiting = asyncio.create_task(task())
        await asyncio.sleep(0)
        answers = [True, False]

        def at_once() -> bool:
            heard.append("at once")
            return answers.pop(0)

        bell.at_once = at_once
        bell.ring()  # all is done
        await asyncio.sleep(0)
        assert heard == ["at once"]
        bell.ring()  # the task has to see to it
        await waiting
        assert heard == ["at once", "at once", "task"]
        bell.ring()  # nobody waits: for the next time
        assert heard == ["at once", "at once", "task"]
        async with asyncio.timeout(PATIENCE):
            await bell.wait()

    asyncio.run(main())
