"""What proxies, browsers and health checks expect of an HTTP server: HEAD, Allow, CORS, idle connections, one port."""

from __future__ import annotations

import http.client
import socket
import time

import httpx
import pytest

from phasewise.cli.serve import Access
from phasewise.engine.limits import Limits
from phasewise.errors import UserError
from phasewise.llm import LLM
from phasewise.serve.app import bound, create_app, listen
from phasewise.serve.guard.policy import ServePolicy
from phasewise.serve.service import Service
from tests.serve.running import Server

ORIGIN = "https://chat.example"


@pytest.mark.parametrize(
    "path", ["/health", "/health/live", "/v1/models", "/v1/models/tiny", "/version", "/metrics", "/"]
)
def test_head_is_get_without_its_body(server: Server, path: str) -> None:
    head, get = (httpx.request(method, server.url + path) for method in ("HEAD", "GET"))
    assert head.status_code == get.status_code == 200 and not head.content and get.content
    assert head.headers["content-type"] == get.headers["content-type"]


@pytest.mark.parametrize("method, path, allowed", [
    ("PUT", "/v1/models", "GET, HEAD"), ("GET", "/v1/chat/completions", "POST"), ("HEAD", "/v1/completions", "POST"),
    ("HEAD", "/events", "GET"), ("PATCH", "/v1/responses/resp_1", "DELETE, GET, HEAD"),
    ("POST", "/health", "GET, HEAD"),
])  # fmt: skip
def test_another_method_is_told_which_there_are(server: Server, method: str, path: str, allowed: str) -> None:
    answer = httpx.request(method, server.url + path)
    assert (answer.status_code, answer.headers["allow"]) == (405, allowed)


def test_streams_are_not_held_back_by_proxies(server: Server) -> None:
    body = {"model": "tiny", "prompt": "the", "max_tokens": 2, "stream": True}
    assert server.post("/v1/completions", body).headers["x-accel-buffering"] == "no"
    with httpx.stream("GET", f"{server.url}/events") as events:
        assert events.headers["x-accel-buffering"] == "no"


def test_pages_of_other_origins_ask_where_they_may(server: Server) -> None:
    asked = {"Origin": ORIGIN, "Access-Control-Request-Method": "POST",
             "Access-Control-Request-Headers": "authorization,content-type"}  # fmt: skip
    body = {"model": "tiny", "prompt": "the", "max_tokens": 1}
    plain = httpx.post(f"{server.url}/v1/completions", json=body, headers=asked)
    assert plain.status_code == 200 and "access-control-allow-origin" not in plain.headers
    with Server(origins=[ORIGIN]) as open_to:
        before = httpx.options(f"{open_to.url}/v1/completions", headers=asked)
        assert before.status_code == 200 and before.headers["access-control-allow-origin"] == ORIGIN
        assert "POST" in before.headers["access-control-allow-methods"]
        assert "authorization" in before.headers["access-control-allow-headers"]
        for extra in ({}, {"stream": True}):
            answer = httpx.post(f"{open_to.url}/v1/completions", json=body | extra, headers=asked)
            assert answer.status_code == 200 and answer.headers["access-control-allow-origin"] == ORIGIN
        other = httpx.post(
            f"{open_to.url}/v1/completions", json=body, headers=asked | {"Origin": "https://else.example"}
        )
        assert "access-control-allow-origin" not in other.headers


def test_origins_of_the_command() -> None:
    assert Access().policy().origins == ()
    assert Access(allowed_origins=[ORIGIN, '["http://localhost:3000", "*"]']).policy().origins == (
        ORIGIN, "http://localhost:3000", "*",
    )  # fmt: skip
    for wrong in ("chat.example", "[1]", "[", "https://chat.example/path"):
        with pytest.raises(UserError, match="--allowed-origins"):
            Access(allowed_origins=[wrong]).policy()


def test_an_idle_connection_is_kept_as_long_as_the_option_says(server: Server) -> None:
    def closed_after(url: str, patience: float) -> float:
        """Seconds until the server closes a connection that has had an answer; `patience` where it does not."""
        connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=patience)
        connection.request("GET", "/health")
        connection.getresponse().read()
        began = time.monotonic()
        assert connection.sock is not None
        try:
            assert connection.sock.recv(1) == b""
        except TimeoutError:
            return patience
        finally:
            connection.close()
        return time.monotonic() - began

    assert ServePolicy().keep_alive == Access().policy().keep_alive == 75
    assert closed_after(server.url, 6.0) == 6.0
    with Server(keep_alive=0.5) as short:
        assert closed_after(short.url, 30.0) < 20.0


def test_of_two_servers_that_start_at_once_the_second_is_told_at_once() -> None:
    with bound("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with pytest.raises(UserError, match=f"cannot listen on 127.0.0.1 port {port}"):
            bound("127.0.0.1", port)
        listen(first, "127.0.0.1")
        with pytest.raises(UserError, match="cannot listen"):
            bound("127.0.0.1", port)


def test_who_listens_second_is_told_so() -> None:
    """Where connections linger from a server before, two may hold the address until one of them listens."""
    pair = [socket.socket(), socket.socket()]
    with pair[0] as first, pair[1] as second:
        for each in pair:
            each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        first.bind(("127.0.0.1", 0))
        second.bind(first.getsockname())
        listen(first, "127.0.0.1")
        with pytest.raises(UserError, match=f"cannot listen on 127.0.0.1 port {first.getsockname()[1]}"):
            listen(second, "127.0.0.1")


def test_a_port_is_free_at_once_after_a_server_with_connections() -> None:
    with bound("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        listen(first, "127.0.0.1")
        client = socket.create_connection(("127.0.0.1", port))
        accepted, _ = first.accept()
        accepted.close()  # the side that closes first is the one that lingers
        client.close()
    bound("127.0.0.1", port).close()


def test_a_budget_that_holds_no_request_is_refused_at_the_start(llm: LLM) -> None:
    with pytest.raises(UserError, match=r"not even a prompt of one token.*--kv-bytes"):
        create_app(LLM(llm.name, limits=Limits(kv_bytes=1024)))
    assert Service(llm, "tiny", ServePolicy()).sampling == {}
