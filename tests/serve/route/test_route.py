"""The router before servers that are functions: where requests go, what happens when a server does not answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import httpx
import pytest

from phasewise.cli import main
from phasewise.cluster.prefix_routing import PrefixRouting
from phasewise.serve.route.front import RouteFront
from phasewise.serve.route.pool import ServerPool, samples
from phasewise.serve.route.upstream import text_of

CHAT = "/v1/chat/completions"
Handler = Callable[[httpx.Request], httpx.Response]


class Servers:
    """Two servers, or more, that count what they are asked. `faults`: what a server answers instead."""

    def __init__(self, n: int = 2, by: Any = "prefix", tokens: bool = False) -> None:
        self.pool = ServerPool([f"http://s{i}" for i in range(n)], PrefixRouting(n, by), tokens)
        self.pool.http = httpx.AsyncClient(transport=httpx.MockTransport(self._answer))
        self.asked: list[tuple[int, str]] = []
        self.faults: dict[int, Handler] = {}
        self.front = httpx.AsyncClient(transport=httpx.ASGITransport(RouteFront(self.pool, 9.0)), base_url="http://r")

    def _answer(self, request: httpx.Request) -> httpx.Response:
        number = int(request.url.host[1:])
        path = request.url.path
        if number in self.faults:
            if path not in ("/health", "/metrics"):
                self.asked.append((number, "!"))
            return self.faults[number](request)
        if path == "/metrics":
            return httpx.Response(200, text=f"# HELP x\nphasewise_prefix_hits_total {number + 1}\ny 3\n")
        if path == "/tokenize":
            return httpx.Response(200, json={"tokens": [ord(c) for c in json.dumps(json.loads(request.content))]})
        if path != "/health":
            self.asked.append((number, path))
        return httpx.Response(200, json={"id": f"resp_{number}{len(self.asked)}", "path": path, "server": number,
                                         "key": request.headers.get("authorization")})  # fmt: skip

    async def chat(self, *texts: str, **more: Any) -> int:
        """The server that a conversation of these messages goes to."""
        messages = [{"role": "user", "content": text} for text in texts]
        answer = await self.front.post(CHAT, json={"model": "m", "messages": messages, **more})
        assert answer.status_code == 200 and answer.headers["x-served-by"] == str(answer.json()["server"])
        return int(answer.json()["server"])


def played(scene: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(scene(), 20))


def refused(request: httpx.Request) -> httpx.Response:
    raise httpx.ConnectError("refused")


def test_conversations_stay_where_they_are_and_others_take_turns() -> None:
    async def scene() -> None:
        servers = Servers()
        homes = {name: await servers.chat(name * 300) for name in "abcd"}
        assert sorted(homes.values()) == [0, 0, 1, 1]
        for turn in range(1, 4):
            for name in "badc":
                assert await servers.chat(name * 300, *["and then? " * 9] * turn) == homes[name]
        for upstream in servers.pool.upstreams:
            assert upstream.hits > 0.6 * upstream.sizes and not upstream.prefilling and not upstream.decoding
        blind = Servers(by="turns")
        for _ in range(4):
            for name in "abc":
                await blind.chat(name * 300)
        assert [number for number, _ in blind.asked] == [0, 1] * 6

    played(scene)


def test_a_long_queue_outweighs_a_prefix() -> None:
    async def scene() -> None:
        servers = Servers()
        home = await servers.chat("a" * 4000)
        assert await servers.chat("a" * 4000, "more") == home
        servers.pool.upstreams[home].prefilling = 9000
        assert await servers.chat("a" * 4000, "more") == 1 - home

    played(scene)


@pytest.mark.parametrize("fault", [refused, lambda request: httpx.Response(503)], ids=["dead", "503"])
def test_a_server_that_does_not_answer_is_passed_over_until_it_does(fault: Handler) -> None:
    async def scene() -> None:
        servers = Servers()
        home = await servers.chat("a" * 500)
        servers.faults[home] = fault
        assert await servers.chat("a" * 500) == 1 - home, "tried there, then elsewhere"
        upstream = servers.pool.upstreams[home]
        assert not upstream.up and upstream.failures == 1 and not upstream.index.blocks
        asked = len(servers.asked)
        assert await servers.chat("a" * 500) == 1 - home and len(servers.asked) == asked + 1, "not tried again"
        del servers.faults[home]
        await servers.pool.check(1.0)
        assert upstream.up and {await servers.chat(letter * 500) for letter in "bc"} == {0, 1}

    played(scene)


def test_where_nobody_answers_the_error_is_openais() -> None:
    async def scene() -> None:
        servers = Servers()
        servers.faults = {0: refused, 1: refused}
        answer = await servers.front.post(CHAT, json={"messages": []})
        assert answer.status_code == 503 and "none of the servers" in answer.json()["error"]["message"]
        other = await servers.front.post("/v1/messages", json={"messages": []})
        assert other.status_code == 503 and other.json()["type"] == "error"
        assert (await servers.front.get("/health")).status_code == 503
        servers.faults = {0: refused, 1: lambda request: httpx.Response(400, json={"error": {"message": "no"}})}
        answer = await servers.front.post(CHAT, content=b"{")
        assert (answer.status_code, answer.json()) == (400, {"error": {"message": "no"}}), (
            "a server's own errors are passed on"
        )
        servers.faults = {0: lambda request: httpx.Response(429), 1: lambda request: httpx.Response(429, text="full")}
        answer = await servers.front.post(CHAT, json={"messages": []})
        assert answer.status_code == 429 and servers.pool.upstreams[0].failures == 3, "a full server is not dead"

    played(scene)


def test_nobody_else_is_asked_once_the_answer_has_begun() -> None:
    class Broken(httpx.AsyncByteStream):
        def __init__(self, *parts: bytes) -> None:
            self.parts = parts

        async def __aiter__(self) -> AsyncIterator[bytes]:
            for part in self.parts:
                yield part
            raise httpx.ReadError("gone")

    async def scene() -> None:
        servers = Servers()
        servers.faults = {0: lambda request: httpx.Response(200, stream=Broken(b'{"id":'))}
        with pytest.raises(Exception, match="broke"):
            await servers.front.post(CHAT, json={"messages": []})
        assert [number for number, _ in servers.asked] == [0]
        servers = Servers(n=1)
        for end in ("\n\n", "\r\n\r\n"):
            parts = [f"data: {{}}{end}: ping{end}data".encode(), f': {{"sequence_number": 7}}{end}data: {{"'.encode()]
            head = {"content-type": "text/event-stream; charset=utf-8"}
            servers.faults = {0: lambda request: httpx.Response(200, stream=Broken(*parts), headers=head)}  # noqa: B023
            whole = b"".join(parts).decode().removesuffix('data: {"')
            for path in (CHAT, "/v1/messages", "/v1/responses"):
                answer = await servers.front.post(path, json={"messages": [], "stream": True})
                assert answer.status_code == 200 and answer.text.startswith(whole), "whole events, byte for byte"
                name, _, told = answer.text.removeprefix(whole).rpartition("data: ")
                error = json.loads(told)
                if path == CHAT:
                    assert not name and error["error"]["code"] == "broken_off", error
                else:
                    assert name == "event: error\n" and error["type"] == "error", error
                assert path != "/v1/responses" or error["sequence_number"] == 8
        servers = Servers()
        servers.faults = {0: lambda request: httpx.Response(200, stream=Broken())}
        assert await servers.chat("a", stream=True) == 1, "a head alone is no answer"

    played(scene)


def test_answers_are_asked_for_where_they_are() -> None:
    async def scene() -> None:
        servers = Servers()
        first = (await servers.front.post("/v1/responses", json={"input": "a" * 99})).json()
        for _ in range(3):
            again = (await servers.front.get(f"/v1/responses/{first['id']}")).json()
            later = await servers.front.post("/v1/responses", json={"input": "b", "previous_response_id": first["id"]})
            assert again["server"] == later.json()["server"] == first["server"]
        answer = await servers.front.get("/v1/models?x=1", headers={"Authorization": "Bearer k"})
        assert answer.json()["path"] == "/v1/models" and answer.json()["key"] == "Bearer k"

    played(scene)


def test_files_and_batches_are_where_they_were_made() -> None:
    """The router sees what a file is called when it comes, and what a batch has made when somebody looks at it."""

    async def scene() -> None:
        servers = Servers()
        for _ in range(4):
            await servers.front.get("/v1/models")  # of an odd number of requests, so that the servers take turns
            file = (await servers.front.post("/v1/files", content=b"--x\r\n")).json()
            home, body = file["server"], {"input_file_id": file["id"], "endpoint": CHAT}
            batch = (await servers.front.post("/v1/batches", json=body)).json()
            made = {"id": batch["id"], "output_file_id": f"made-{batch['id']}", "server": home}
            servers.faults = {home: lambda request: httpx.Response(200, json=made)}  # noqa: B023
            for path in (f"batches/{batch['id']}", f"batches/{batch['id']}/cancel", f"files/{file['id']}",
                         f"files/{made['output_file_id']}/content"):  # fmt: skip
                assert (await servers.front.get(f"/v1/{path}")).headers["x-served-by"] == str(home), path
            servers.faults = {}
        assert {number for number, path in servers.asked if path == "/v1/batches"} == {0, 1}

    played(scene)


def test_prompts_may_be_compared_as_tokens() -> None:
    async def scene() -> None:
        servers = Servers(tokens=True)
        assert await servers.pool.prompt("/v1/completions", {"prompt": [1, 2, 3]}, []) == [1, 2, 3]
        found = await servers.pool.prompt(CHAT, {"messages": [], "seed": 3}, [])
        assert bytes(found) == b'{"messages": []}'
        servers.faults = {0: refused, 1: refused}
        assert await servers.pool.prompt(CHAT, {"messages": []}, []) == ()

    played(scene)


def test_numbers_are_told() -> None:
    async def scene() -> None:
        servers = Servers()
        await servers.chat("a" * 500)
        text = (await servers.front.get("/metrics")).text
        assert "phasewise_prefix_hits_total 3\n" in text and 'phasewise_route_requests{server="0"} 1\n' in text
        assert "\ny " not in text

    played(scene)
    assert samples('a_total{b="c d"} 2\nx_created 5\nz_bucket{le="+Inf"} nan-\n') == [('a_total{b="c d"}', 2.0)]


@pytest.mark.parametrize(
    ("body", "text"),
    [({"prompt": "abc"}, b"abc"), ({"prompt": ["abc", "d"]}, b"abc"), ({"prompt": [[4, 5], [6]]}, [4, 5]),
     ({"input": [{"role": "user", "content": "x"}], "instructions": "y"}, b'y\n{"content": "x", "role": "user"}'),
     ({"system": "s", "messages": [1, 2]}, b"s\n1\n2"), ({"prompt": [2**70]}, b"1180591620717411303424"), ({}, b"")],
)  # fmt: skip
def test_what_prompts_begin_with(body: dict[str, Any], text: Any) -> None:
    assert text_of(body) == text


@pytest.mark.parametrize(
    ("words", "why"),
    [(["--to", "127.0.0.1:1"], "--to 127.0.0.1:1: give the address"),
     (["--to", "http://a", "--by", "luck"], "--by: route='luck'"),
     (["--to", "http://a", "--to", "http://b", "--kv-events", "tcp://a:1"], "--kv-events is given 1 times for 2"),
     (["--to", "http://a", "--weight", "-1"], "--weight=-1")],
)  # fmt: skip
def test_mistakes_are_named(words: list[str], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["route", *words])
    assert left.value.code == 2 and why in capsys.readouterr().err
