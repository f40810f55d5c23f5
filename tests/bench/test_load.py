"""The load client against servers that are functions, and once against a real one."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from aiohttp import web

from phasewise.bench.load import LoadResult, Progress, measure
from phasewise.bench.server import serving
from phasewise.bench.workloads import Shot
from phasewise.errors import UserError


class Served:
    """A server in this process: the first piece after `wait` seconds, the others `gap` apart."""

    def __init__(
        self, wait: float = 0.0, gap: float = 0.0, pieces: int | None = None, status: int = 200, mute: bool = False
    ) -> None:
        self.wait, self.gap, self.pieces, self.status = wait, gap, pieces, status
        self.mute = mute  # tokens have no text, but are counted as they come
        self.live = self.most = 0
        self.asked: list[dict[str, object]] = []

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "little"}]})

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.asked.append(body)
        if self.status != 200:
            return web.json_response({"error": {"message": "too many"}}, status=self.status)
        self.live += 1
        self.most = max(self.most, self.live)
        response = web.StreamResponse()
        await response.prepare(request)
        await self.stream(response, body["max_tokens"])
        self.live -= 1
        return response

    async def stream(self, response: web.StreamResponse, new: int) -> None:
        await asyncio.sleep(self.wait)
        for i in range(self.pieces or new):
            await asyncio.sleep(self.gap if i else 0.0)
            if self.mute:
                await response.write(event({"choices": [{"text": ""}], "usage": {"completion_tokens": 2 * i}}))
            else:
                await response.write(event({"choices": [{"text": "x", "finish_reason": None}]}))
        end = event({"choices": [{"text": "", "finish_reason": "length"}]})
        end += event({"choices": [], "usage": {"completion_tokens": new}}) + b"data: [DONE]\n\n"
        await response.write(end[:40])  # lines do not come whole
        await response.write(end[40:])


@contextmanager
def at(server: Served) -> Iterator[str]:
    """Its URL, while it runs in a thread of its own."""
    loop, app = asyncio.new_event_loop(), web.Application()
    app.add_routes([web.get("/v1/models", server.models), web.post("/v1/completions", server.complete)])
    runner = web.AppRunner(app)
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def start() -> str:
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{runner.addresses[0][1]}"

    try:
        yield asyncio.run_coroutine_threadsafe(start(), loop).result()
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def result_of(server: Served, shots: list[Shot], progress: Progress = lambda done: None) -> LoadResult:
    with at(server) as url:
        return measure(url, shots, progress)


def event(body: object) -> bytes:
    return f"data: {json.dumps(body)}\n\n".encode()


def shots(n: int, gap: float = 0.0, new: int = 4) -> list[Shot]:
    return [Shot(i * gap, [5, 6, 7], new) for i in range(n)]


def test_arrivals_do_not_wait_for_answers() -> None:
    server = Served(wait=0.3)
    result = result_of(server, shots(10, gap=0.01))
    assert server.most == 10  # all are under way before the first is answered
    assert result.seconds < 1.5
    assert [one.error for one in result.served] == [None] * 10


def test_what_is_asked_is_what_is_measured() -> None:
    server, told = Served(), list[int]()
    result = result_of(server, shots(2), told.append)
    assert result.model == "little" and told == [1, 2]
    body = server.asked[0]
    assert body["prompt"] == [5, 6, 7] and body["max_tokens"] == 4 and body["model"] == "little"
    assert body["temperature"] == 0 and body["ignore_eos"] is True and body["stream"] is True


def test_times_are_of_the_pieces_and_counts_of_the_usage() -> None:
    result = result_of(Served(wait=0.2, gap=0.05, pieces=3), shots(1, new=9))
    trace = result.served[0].trace
    assert result.served[0].new_tokens == 9 and len(trace.tokens) == 3
    assert trace.ttft is not None and 0.2 <= trace.ttft < 0.6
    assert len(trace.itl) == 2 and min(trace.itl) >= 0.045
    assert trace.tpot == pytest.approx((trace.tokens[-1] - trace.tokens[0]) / 8)


def test_tokens_without_text_are_stamped_where_the_server_counts_them() -> None:
    result = result_of(Served(gap=0.05, pieces=5, mute=True), shots(1, new=8))
    trace = result.served[0].trace
    assert trace.counts == [2, 2, 2, 2] and min(trace.itl) >= 0.045


def test_latency_counts_from_when_a_request_was_due() -> None:
    late = Shot(-0.5, [1], 2)  # the client is half a second behind its plan
    result = result_of(Served(), [late])
    ttft = result.served[0].trace.ttft
    assert ttft is not None and ttft >= 0.5 and result.late >= 0.5


def test_failures_are_results() -> None:
    refused = result_of(Served(status=429), shots(2))
    assert all(one.error is not None and "HTTP 429: too many" in one.error for one in refused.served)


def test_a_short_answer_is_a_failure() -> None:
    class Short(Served):
        async def stream(self, response: web.StreamResponse, new: int) -> None:
            done = {"choices": [{"text": "x", "finish_reason": "stop"}], "usage": {"completion_tokens": 1}}
            await response.write(event(done))

    result = result_of(Short(), shots(1))
    assert result.served[0].error == "asked for 4 tokens, got 1"


def test_no_server_is_the_users_error() -> None:
    with pytest.raises(UserError, match="no OpenAI-compatible server answers"):
        measure("http://127.0.0.1:1", shots(1), lambda done: None)


@pytest.mark.thorough
def test_a_server_that_cannot_start_says_why() -> None:
    with pytest.raises(UserError, match="did not start: unknown evict method 'snapkw'"), serving(["--evict", "snapkw"]):
        pass
