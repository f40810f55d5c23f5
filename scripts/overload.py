"""What a server does with three times as much as it can do: who is taken is served in time, the rest hears so.

    python scripts/overload.py [--model pocket] [--target 1000] [--times 3] [--seconds 30] [--seed 0]

Starts `phasewise serve --refuse-late`, finds how many requests a second it completes when as many clients as it has
places ask all the time, then sends `--times` as many at random moments, each with a target of `--target` milliseconds
for its first token, whatever becomes of them. Exits with 1 if the 99th percentile of the time to the first token of
those that were taken is beyond the target, or if others hear anything but 429 with Retry-After.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from phasewise.bench.server import serving

PLACES = 8  # requests that share the server's steps
WORDS, NEW = (20, 200), (8, 48)  # of prompts, and tokens of answers: from, to
WARM_SECONDS = 3.0
PATIENCE = 900.0  # seconds for an answer: where others use the machine, processes may stand still for minutes


@dataclass(frozen=True)
class Seen:
    """What a client saw of one request; times in seconds since it was sent."""

    status: int
    first: float | None  # until its first token
    end: float
    retry: str | None


def body(rng: random.Random, target: float | None) -> dict[str, Any]:
    words = " ".join(f"w{rng.randint(0, 999)}" for _ in range(rng.randint(*WORDS)))
    asked = {"prompt": words, "max_tokens": rng.randint(*NEW), "ignore_eos": True, "stream": True}
    return asked if target is None else {**asked, "slo": {"ttft_ms": target}}


async def ask(http: httpx.AsyncClient, asked: dict[str, Any]) -> Seen:
    began, first = time.monotonic(), None
    async with http.stream("POST", "/v1/completions", json=asked) as answer:
        async for line in answer.aiter_lines():
            if first is None and line.startswith("data: ") and answer.status_code == 200:
                first = time.monotonic() - began
        return Seen(answer.status_code, first, time.monotonic() - began, answer.headers.get("retry-after"))


async def capacity(http: httpx.AsyncClient, seconds: float, rng: random.Random) -> float:
    """Requests completed a second, as many at a time as the server has places."""
    done = 0

    async def client(until: float) -> None:
        nonlocal done
        while time.monotonic() < until:
            assert (await ask(http, body(rng, None))).status == 200
            done += 1

    for long in (WARM_SECONDS, seconds):
        done, began = 0, time.monotonic()
        await asyncio.gather(*(client(began + long) for _ in range(PLACES)))
        rate = done / (time.monotonic() - began)
    return rate


async def overload(http: httpx.AsyncClient, rate: float, args: argparse.Namespace, rng: random.Random) -> list[Seen]:
    """So many requests a second, at random moments, whatever becomes of them."""
    began, due, tasks = time.monotonic(), 0.0, []
    while due < args.seconds:
        due += rng.expovariate(rate)
        await asyncio.sleep(max(0.0, began + due - time.monotonic()))
        tasks.append(asyncio.create_task(ask(http, body(rng, args.target))))
    return list(await asyncio.gather(*tasks))


def at(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


async def run(url: str, args: argparse.Namespace) -> int:
    rng = random.Random(args.seed)
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE, limits=limits) as http:
        most = await capacity(http, args.seconds, rng)
        seen = await overload(http, args.times * most, args, rng)
    taken = [one.first for one in seen if one.first is not None]
    refused = [one for one in seen if one.status == 429]
    print(f"capacity: {most:.1f} requests/s, {PLACES} at a time")
    print(f"offered: {len(seen) / args.seconds:.1f} requests/s for {args.seconds:.0f} s, target {args.target:.0f} ms")
    print(f"taken: {len(taken)} ({len(taken) / args.seconds:.1f} a second), time to the first token p50 "
          f"{1e3 * at(taken, 0.5):.0f} ms, p99 {1e3 * at(taken, 0.99):.0f} ms, "
          f"{100 * sum(1e3 * first <= args.target for first in taken) / len(taken):.1f} % in time")  # fmt: skip
    if refused:
        ends = [one.end for one in refused]
        told = f"p50 {1e3 * at(ends, 0.5):.0f} ms, p99 {1e3 * at(ends, 0.99):.0f} ms"
        print(f"refused: {len(refused)}, told so after {told}")
    found = []
    if 1e3 * at(taken, 0.99) > args.target:
        found.append("the 99th percentile of those that were taken is beyond the target")
    if any(one.retry is None for one in refused) or len(taken) + len(refused) < len(seen):
        found.append(f"other answers than 200 and 429 with Retry-After: {sorted({one.status for one in seen})}")
    print("\n".join(found) or "in time", file=sys.stderr if found else sys.stdout)
    return int(bool(found))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="pocket")
    parser.add_argument("--target", type=float, default=1000.0)
    parser.add_argument("--times", type=float, default=3.0)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    words = ["--model", args.model, "--max-running", str(PLACES), "--refuse-late", "--no-prefix-cache"]
    with serving(words) as url:
        return asyncio.run(run(url, args))


if __name__ == "__main__":
    sys.exit(main())
