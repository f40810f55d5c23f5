"""A client that takes nothing of its answer: after a while it is gone, and all that it held is free."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.serve.running import PATIENCE, Server
from tests.serve.test_keys import SECRETS, table

ASKED: dict[str, Any] = {
    "prompt": "the fox",
    "max_tokens": 2000,
    "ignore_eos": True,
    "stream": True,
    "n": 8,
    "logprobs": 20,
}


def eventually(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="this system cannot end such connections")
def test_its_request_ends_and_its_slot_is_free(tmp_path: Path) -> None:
    ring = tmp_path / "keys.toml"
    ring.write_text(table("busy", concurrent=1) + table("root", metrics=True))
    headers = {"Authorization": f"Bearer {SECRETS['busy']}"}
    body = json.dumps(ASKED).encode()
    with Server(keys=str(ring), secret=SECRETS["root"], write_timeout=1.0) as server, socket.socket() as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        deaf.connect(("127.0.0.1", server.port))
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: {headers['Authorization']}\r\n"
        deaf.sendall(head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        eventually(lambda: server.metrics()['phasewise_key_requests_running{key="busy"}'] == 1)
        short = {"prompt": "the", "max_tokens": 2}
        assert server.post("/v1/completions", short, headers=headers).status_code == 429, "its key has one slot"
        eventually(lambda: server.metrics()['phasewise_key_requests_running{key="busy"}'] == 0)
        after = server.settled()
        assert after["phasewise_kv_live_bytes"] == 0
        assert after.get('phasewise_requests_total{how="cancelled"}', 0) > 0, "it has all been sent: nothing was held"
        assert server.post("/v1/completions", short, headers=headers).status_code == 200


def test_who_reads_slowly_is_served(server: Server) -> None:
    """Of a server with the default of a minute: whoever takes a little now and then is not cut off."""
    body = json.dumps({**ASKED, "n": 1, "max_tokens": 60}).encode()
    with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE) as slow:
        slow.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
                     b"Content-Length: %d\r\n\r\n" % len(body) + body)  # fmt: skip
        said = b""
        while part := slow.recv(500):
            said += part
    assert b"data: [DONE]" in said
