"""Hundreds of open streams: all of them flow, and each gets its own text."""

from __future__ import annotations

import asyncio
import json
from itertools import pairwise

import aiohttp

from phasewise.llm import LLM
from phasewise.request.params import Params
from tests.serve.running import PATIENCE, Server

STREAMS, NEW = 512, 16


def test_512_streams_none_of_which_starves(llm: LLM) -> None:
    """Between two events of a stream no other may have had many: what is counted is the order, not the time."""
    order: list[int] = []
    texts = [""] * STREAMS

    async def one(client: aiohttp.ClientSession, i: int) -> None:
        body = {
            "model": "tiny", "prompt": f"the fox {i % 7}", "max_tokens": NEW, "temperature": 0, "ignore_eos": True,
            "stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }  # fmt: skip
        async with client.post("/v1/completions", json=body) as response:
            assert response.status == 200, await response.text()
            async for line in response.content:
                if line.startswith(b"data: {") and (choices := json.loads(line[6:])["choices"]):
                    order.append(i)
                    texts[i] += choices[0]["text"]

    async def everybody(url: str) -> None:
        timeout, unlimited = aiohttp.ClientTimeout(total=4 * PATIENCE), aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(url, timeout=timeout, connector=unlimited) as client:
            await asyncio.gather(*(one(client, i) for i in range(STREAMS)))

    with Server(limits={"max_running": STREAMS}) as server:
        asyncio.run(everybody(server.url))
    wanted = [llm.generate(f"the fox {i}", Params(max_tokens=NEW, ignore_eos=True))[0].text for i in range(7)]
    assert texts == [wanted[i % 7] for i in range(STREAMS)]
    at: dict[int, list[int]] = {i: [] for i in range(STREAMS)}
    for place, i in enumerate(order):
        at[i].append(place)
    longest = max(b - a for places in at.values() for a, b in pairwise(places))
    assert longest <= 6 * STREAMS, f"between two events of a stream there were {longest} of others"
