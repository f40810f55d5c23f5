"""Many clients at once: each gets its own text or a cancellation, never another's, and every KV byte goes back."""

from __future__ import annotations

import asyncio
import random
import socket
import time
from typing import Any

import httpx
import openai

from phasewise.llm import LLM
from phasewise.request.params import Params
from tests.serve.running import Server

WORDS = ["the", "fox", "dog", "lazy", "quick", "brown", "over", "jumps", "and then", "other", "thing"]


async def one(client: openai.AsyncOpenAI, prompt: str, size: int, quit_after: int | None, stream: bool) -> str | None:
    """The text a client got; None if it left early."""
    body: dict[str, Any] = {"model": "tiny", "prompt": prompt, "max_tokens": size, "temperature": 0}
    body["extra_body"] = {"ignore_eos": True}
    if not stream:
        call = client.completions.create(**body)
        if quit_after is None:
            return (await call).choices[0].text
        try:
            await asyncio.wait_for(call, quit_after * 0.02)
        except (TimeoutError, openai.APITimeoutError):
            return None
        raise AssertionError("it should not have been done yet")
    text, ends, events = "", 0, 0
    async with await client.completions.create(**body, stream=True) as chunks:
        async for chunk in chunks:
            events += 1
            if quit_after is not None and events >= quit_after:
                return None
            text += chunk.choices[0].text
            ends += chunk.choices[0].finish_reason is not None
    assert ends == 1, f"the stream ended {ends} times"
    return text


def test_32_clients_of_whom_some_leave(server: Server, llm: LLM) -> None:
    rng = random.Random(0)
    before = server.settled()
    orders = []
    for i in range(32):
        prompt, leaves, stream = " ".join(rng.choices(WORDS, k=rng.randint(1, 12))), i % 3 == 2, rng.random() < 0.6
        size = 600 if leaves else rng.randint(1, 40)
        orders.append((prompt, size, rng.randint(1, 10) if leaves else None, stream))

    async def everybody() -> list[str | None]:
        async with server.async_client() as client:
            return await asyncio.gather(*(one(client, *order) for order in orders))

    texts = asyncio.run(everybody())
    for (prompt, size, quit_after, _), text in zip(orders, texts):
        if quit_after is None:
            assert text == llm.generate(prompt, Params(max_tokens=size, ignore_eos=True))[0].text
        else:
            assert text is None
    after = server.settled()

    def left(how: str) -> float:
        name = f'phasewise_requests_total{{how="{how}"}}'
        return after.get(name, 0) - before.get(name, 0)

    gone = sum(quit_after is not None for _, _, quit_after, _ in orders)
    accepted = after["phasewise_requests_accepted_total"] - before["phasewise_requests_accepted_total"]
    assert accepted <= 32  # some may have left before their request was there
    assert left("length") == 32 - gone
    assert left("cancelled") == accepted - left("length") > 0


def test_a_disconnect_cancels(server: Server) -> None:
    for stream in (True, False):
        before = server.settled()
        body = {"prompt": "the", "max_tokens": 2000, "stream": stream, "ignore_eos": True, "n": 2}
        try:
            with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=0.3, verify=False) as response:
                next(response.iter_bytes())
        except httpx.ReadTimeout:
            assert not stream
        name = 'phasewise_requests_total{how="cancelled"}'
        assert server.settled()[name] == before.get(name, 0) + 2


def test_a_reader_that_pauses_blocks_nobody(server: Server, llm: LLM) -> None:
    """Its text waits for it; once it reads on, nothing is missing."""
    size = 700
    body = f'{{"prompt": "the fox", "max_tokens": {size}, "stream": true, "temperature": 0, "ignore_eos": true}}'
    with socket.create_connection(("127.0.0.1", server.port)) as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16384)
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
        slow.sendall((head + body).encode())
        assert slow.recv(10)
        began = time.monotonic()
        assert server.client().completions.create(model="tiny", prompt="the", max_tokens=4).choices[0].text
        assert time.monotonic() - began < 10
        time.sleep(0.1)
        received = b""
        while part := slow.recv(65536):
            received += part
    assert received.count(b'"finish_reason": "length"') == 1 and b"[DONE]" in received
    server.settled()


def test_siblings_share_their_prompt(server: Server) -> None:
    before = server.settled()
    prompt = "a long prompt that nobody else has sent: " + "fox dog " * 60
    answer = server.client().completions.create(model="tiny", prompt=prompt, n=4, max_tokens=2, temperature=2)
    assert answer.usage is not None
    rows = server.settled()["phasewise_rows_total"] - before["phasewise_rows_total"]
    assert rows < 1.2 * answer.usage.prompt_tokens


def test_latencies_are_measured(server: Server) -> None:
    def counts() -> dict[str, float]:
        names = ("time_to_first_token", "time_per_output_token", "inter_token_latency", "request", "queue")
        now = server.settled()
        return {name: now[f"phasewise_{name}_seconds_count"] for name in names}

    before = counts()
    server.post("/v1/completions", {"prompt": "the", "max_tokens": 6, "ignore_eos": True})
    more = {name: count - before[name] for name, count in counts().items()}
    assert more == {"time_to_first_token": 1, "time_per_output_token": 1, "inter_token_latency": 5, "request": 1,
                    "queue": 1}  # fmt: skip
    now = server.metrics()
    assert now["phasewise_emitted_total"] > 0
    assert now["phasewise_kv_limit_bytes"] > 0
    assert now['phasewise_request_seconds_bucket{le="+Inf"}'] == now["phasewise_request_seconds_count"]
