"""Garbage in: random JSON, half requests, giant headers, slow senders. The server stays, and others notice nothing."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import string
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import httpx
import pytest

from phasewise.llm import LLM
from phasewise.request.params import Params
from tests.serve.running import PATIENCE, Server

VALID: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"model": "tiny", "prompt": "the", "max_tokens": 3, "temperature": 1, "n": 2, "seed": 1}),
    ("/v1/completions", {"prompt": ["the", "fox"], "max_tokens": 2, "stop": ["x", "yz"], "stream": True, "echo": True}),
    ("/v1/completions", {"prompt": [5, 6, 7], "max_tokens": 2, "logit_bias": {"7": -5}, "top_p": 0.5, "top_k": 3}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "the"}], "max_tokens": 3, "stream": True,
                              "stream_options": {"include_usage": True}}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}],
                              "max_tokens": 2, "chat_template_kwargs": {"a": 1}, "presence_penalty": 1, "min_p": 0.1}),
]  # fmt: skip


def junk(rng: random.Random, depth: int = 0) -> Any:
    """A random JSON value."""
    kinds = [
        lambda: None, lambda: rng.random() < 0.5, lambda: rng.randint(-(2**70), 2**70), lambda: rng.randint(-3, 400),
        lambda: rng.uniform(-1e3, 1e3), lambda: 10 ** rng.uniform(-300, 300), lambda: rng.choice([0, 0.0, 1e-320]),
        lambda: "".join(rng.choices(string.printable, k=rng.randint(0, 12))),
        lambda: "".join(chr(rng.choice([rng.randrange(0xD800), rng.randrange(0xE000, 0x110000)])) for _ in range(4)),
        lambda: rng.choice(["tiny", "user", "system", "\0", "<|im_end|>", "{{ 7*7 }}", "\ud83d", "a" * 5000]),
    ]  # fmt: skip
    if depth < 3:
        kinds += [lambda: [junk(rng, depth + 1) for _ in range(rng.randint(0, 4))]] * 2
        kinds += [lambda: {str(junk(rng, 3)): junk(rng, depth + 1) for _ in range(rng.randint(0, 3))}] * 2
    return rng.choice(kinds)()


def garbled(rng: random.Random) -> tuple[str, bytes]:
    """A valid request with something wrong, or not: fields changed, dropped or added, or bytes changed."""
    path, body = rng.choice(VALID)
    body = dict(body)
    for _ in range(rng.randint(1, 3)):
        name = rng.choice([*body, "unknown", "logprobs", "tools", "best_of", "stop_token_ids", "frequency_penalty"])
        if rng.random() < 0.2:
            body.pop(name, None)
        elif rng.random() < 0.5 and isinstance(body.get(name), list) and body[name]:
            body[name] = [*body[name]]
            body[name][rng.randrange(len(body[name]))] = junk(rng)
        else:
            body[name] = junk(rng)
    if isinstance(body.get("n"), int) and body["n"] > 8:
        body["n"] = 200
    if not isinstance(body.get("max_tokens"), str | list | dict) and (body.get("max_tokens") or 99) > 50:
        body["max_tokens"] = 5  # those that are valid shall be short
    raw = bytearray(json.dumps(body).encode())
    if rng.random() < 0.15:
        for _ in range(rng.randint(1, 4)):
            raw[rng.randrange(len(raw))] = rng.randrange(256)
    return path, bytes(raw)


def test_garbage_requests(server: Server, llm: LLM) -> None:
    rng = random.Random(1)
    requests = [garbled(rng) for _ in range(60)]
    seen: dict[int, int] = {}

    async def garbage(client: httpx.AsyncClient, gate: asyncio.Semaphore, path: str, body: bytes) -> None:
        async with gate:
            response = await client.post(path, content=body)
        seen[response.status_code] = seen.get(response.status_code, 0) + 1
        assert response.status_code in (200, 400, 404), (response.status_code, body, response.text)
        if response.status_code != 200:
            assert set(response.json()["error"]) == {"message", "type", "param", "code"}

    async def everything() -> str:
        gate, good = asyncio.Semaphore(8), server.async_client()
        async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE, verify=False) as client:
            answer, *_ = await asyncio.gather(
                good.completions.create(
                    model="tiny", prompt="the fox", max_tokens=300, temperature=0, extra_body={"ignore_eos": True}
                ),
                *(garbage(client, gate, path, body) for path, body in requests),
            )
        return answer.choices[0].text

    assert asyncio.run(everything()) == llm.generate("the fox", Params(max_tokens=300, ignore_eos=True))[0].text
    assert seen.get(200, 0) > 3 and seen.get(400, 0) > 15, f"the garbage is of one kind: {seen}"
    assert server.health().status_code == 200
    server.settled()
    assert server.errors() == "", "nobody's garbage may fill the log"


COMPLETE = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
ABUSE = {
    "nothing": b"",
    "half a request line": b"POST /v1/comp",
    "half the headers": COMPLETE + b"Content-Type: appl",
    "half a body": COMPLETE + b'Content-Length: 500\r\n\r\n{"prompt": "th',
    "half a chunk": COMPLETE + b'Transfer-Encoding: chunked\r\n\r\nff\r\n{"pro',
    "a giant header": COMPLETE + b"X: " + b"a" * 300_000,
    "a giant path": b"GET /" + b"a" * 300_000 + b" HTTP/1.1\r\n\r\n",
    "many headers": COMPLETE + b"".join(b"X-%d: y\r\n" % i for i in range(5000)),
    "a wrong length": COMPLETE + b"Content-Length: -5\r\n\r\n",
    "two lengths": COMPLETE + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello!",
    "no HTTP": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(256)),
    "zeros": bytes(10_000),
    "an upgrade": b"GET /v1/models HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n",
    "a long pipeline": b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n" * 200,
}


@contextmanager
def abused(server: Server) -> Iterator[list[socket.socket]]:
    """All of these at once, each left open."""
    with ExitStack() as stack:
        opened = []
        for data in [*ABUSE.values(), *([b"POST /v1/completions HTTP/1.1\r\n"] * 50)]:
            opened.append(stack.enter_context(socket.create_connection(("127.0.0.1", server.port))))
            with suppress(ConnectionResetError, BrokenPipeError):  # refused before it was all sent
                opened[-1].sendall(data)
        yield opened


def test_abused_connections_do_not_block_others(server: Server, llm: LLM) -> None:
    expected = llm.generate("the fox", Params(max_tokens=30))[0].text
    with abused(server) as opened:
        for _ in range(3):
            answer = server.client().completions.create(model="tiny", prompt="the fox", temperature=0, max_tokens=30)
            assert answer.choices[0].text == expected
            assert server.health().status_code == 200
            for connection in opened[-50:]:
                connection.sendall(b"X: y\r\n")  # they go on, slowly
    assert server.health().status_code == 200
    server.settled()


@pytest.mark.parametrize("name", ["a giant header", "a wrong length", "no HTTP"])
def test_nonsense_is_refused(server: Server, name: str) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE) as connection:
        try:
            connection.sendall(ABUSE[name])
            answer = connection.recv(4096)
        except (ConnectionResetError, BrokenPipeError):
            answer = b""  # closed while it was still being sent
    assert answer == b"" or answer.startswith(b"HTTP/1.1 400")


def test_a_body_in_single_bytes(server: Server) -> None:
    body = b'{"prompt": "the", "max_tokens": 2}'
    with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE) as connection:
        for byte in COMPLETE + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body:
            connection.sendall(bytes([byte]))
        answer = b""
        while part := connection.recv(4096):
            answer += part
    assert answer.startswith(b"HTTP/1.1 200")


def test_a_client_that_leaves_before_its_body_is_there(server: Server) -> None:
    for _ in range(20):
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            connection.sendall(ABUSE["half a body"])
    assert server.health().status_code == 200
    server.settled()
    assert server.errors() == ""
