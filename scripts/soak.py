"""Whether a server's memory stays flat under mixed traffic: what it is sent, what it holds, and a verdict.

    python scripts/soak.py MINUTES [--everything] [--clients 8] [--csv soak.csv] [--plot soak.png] [--seed 0]

Starts `phasewise serve` and sends it, from so many clients at once, streams, streams and answers that are left in the
middle, bad requests, half ones, tools, structured output, long prompts, samples, log-probabilities, embeddings and
stored responses, all drawn by `--seed`. Every few seconds resident memory, KV bytes, open files and threads are noted.
With `--everything` the server has an adapter, batches and tiers for KV below its budget, and stands behind `phasewise
route`: memory is the server's, statuses are those of the router. `--model` (pocket) is served.

Exits with 1 if the line through resident memory over the last two thirds of the requests rises by more than 2 % of its
mean, if an answer has a status that it should not have, if KV of requests is left at the end, or more open files or
threads than after a third.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import csv
import json
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from phasewise.bench.server import free_port
from phasewise.load import model_path
from tests import peft

WORDS = (
    "the", "a", "def", "import", "return", "for", "in", "if", "not", "self", "x",
    "y", "list", "of", "and", "to", "print", "value", "name", "quick", "brown", "fox", "dog",
)  # fmt: skip
OPTIONS = ("--max-running", "16", "--kv-bytes", "64M", "--stored-bytes", "2M", "--recipe", "fast=draft=prompt_lookup")
EVERY = 3.0  # seconds between two samples
PATIENCE = 900.0  # seconds for an answer: on a machine that others use, processes may stand still for minutes
BOUND = 0.02  # of the mean: how much the line through resident memory may rise
OVER = ("completed", "failed", "cancelled", "expired")  # of batches
LEFTOVER = 4  # open files and threads that there may be more of than at first (pools grow a little)
TOOL = {"type": "function", "function": {"name": "calculator", "parameters": {
    "type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]}}}  # fmt: skip


@dataclass(frozen=True)
class Sample:
    """What the server held at some second; `rss` and `kv` in bytes, `kv` of requests alone."""

    seconds: float
    rss: int
    kv: int
    prefix: int
    files: int
    threads: int
    requests: int


class Traffic:
    """One client's requests, one after the other. `seen` counts kinds and what became of them."""

    def __init__(self, http: httpx.AsyncClient, rng: random.Random, seen: Counter[tuple[str, str]]) -> None:
        self._http, self._rng, self._seen = http, rng, seen
        self.wrong: str | None = None
        self._names = ["pocket", "pocket@fast"]
        self._kinds: list[tuple[int, Callable[[], Awaitable[str]]]] = [
            (4, self.stream), (3, self.leaves), (2, self.hangs_up), (3, self.bad), (2, self.half), (2, self.tools),
            (2, self.structured), (2, self.long), (2, self.samples), (1, self.embeds), (2, self.stores),
        ]  # fmt: skip

    def with_everything(self) -> None:
        """Ask for the adapter too, and for batches."""
        self._names += ["sql", "sql@fast"]
        self._kinds.append((1, self.batches))

    async def go_on(self, until: float) -> None:
        weights, kinds = zip(*self._kinds)
        while time.monotonic() < until and self.wrong is None:
            (kind,) = self._rng.choices(kinds, weights)
            self._seen[kind.__name__, await kind()] += 1

    def _text(self, least: int, most: int) -> str:
        return " ".join(self._rng.choices(WORDS, k=self._rng.randint(least, most)))

    def _body(self, **fields: Any) -> dict[str, Any]:
        own = {"prompt": self._text(3, 60), "max_tokens": self._rng.randint(1, 60), "ignore_eos": True}
        return {**own, "model": self._rng.choice(self._names), **fields}

    async def _post(self, path: str, body: Any, *good: int) -> httpx.Response:
        answer = await self._http.post(path, json=body)
        if answer.status_code not in (*good, 429):
            self.wrong = f"{path} answered {answer.status_code}: {json.dumps(body)[:300]} -> {answer.text[:300]}"
        return answer

    async def stream(self) -> str:
        async with self._http.stream("POST", "/v1/completions", json=self._body(stream=True)) as answer:
            lines = [line async for line in answer.aiter_lines() if line]
        return "whole" if lines and lines[-1] == "data: [DONE]" else str(answer.status_code)

    async def leaves(self) -> str:
        """In the middle of a stream."""
        body, some = self._body(stream=True, max_tokens=400, n=self._rng.randint(1, 3)), self._rng.randint(1, 20)
        async with self._http.stream("POST", "/v1/completions", json=body) as answer:
            async for _ in answer.aiter_lines():
                some -= 1
                if some <= 0:
                    break
        return "left"

    async def hangs_up(self) -> str:
        """Before an answer is there."""
        with contextlib.suppress(httpx.TimeoutException):
            await self._http.post("/v1/completions", json=self._body(max_tokens=400), timeout=self._rng.random() / 2)
            return "was quicker"
        return "left"

    async def bad(self) -> str:
        bodies: list[Any] = [
            {"prompt": 5}, {}, self._body(max_tokens=-1), self._body(logit_bias={"x": 1}), self._body(prompt=[10**9]),
            self._body(unknown=self._text(1, 9)), self._body(guided_regex="(" * self._rng.randint(1, 99)),
            self._body(guided_json={"type": self._text(1, 1)}), self._body(temperature=9), self._body(n=10**6),
        ]  # fmt: skip
        return str((await self._post("/v1/completions", self._rng.choice(bodies), 200, 400)).status_code)

    async def half(self) -> str:
        """A connection that is dropped before its request is whole."""
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 500\r\n\r\n"
        url = self._http.base_url
        _, writer = await asyncio.open_connection(url.host, url.port)
        writer.write(head[: self._rng.randint(0, len(head))])
        with contextlib.suppress(ConnectionError):
            await writer.drain()
            writer.close()
            await writer.wait_closed()
        return "dropped"

    async def tools(self) -> str:
        """Refused where the model's chat template shows it no tools."""
        asked = f"What is {self._rng.randint(1, 99)} + {self._rng.randint(1, 99)}?"
        body = {"messages": [{"role": "user", "content": asked}], "tools": [TOOL], "max_tokens": 40,
                "tool_choice": self._rng.choice(["auto", "required", "none"])}  # fmt: skip
        return str((await self._post("/v1/chat/completions", body, 200, 400)).status_code)

    async def structured(self) -> str:
        """By a schema that nobody has asked for before, a choice, or an expression."""
        name = f"field{self._rng.randint(0, 10**9)}"
        schema = {"type": "object", "properties": {name: {"enum": ["a", "b", self._text(1, 3)]}}, "required": [name]}
        wanted = self._rng.choice([{"guided_json": schema}, {"guided_choice": [self._text(1, 2), "yes"]},
                                   {"guided_regex": f"[0-9]{{{self._rng.randint(1, 30)}}}"}])  # fmt: skip
        return str((await self._post("/v1/completions", self._body(ignore_eos=False, **wanted), 200)).status_code)

    async def long(self) -> str:
        """Too long ones among them."""
        body = self._body(prompt=self._text(200, 900), max_tokens=8)
        return str((await self._post("/v1/completions", body, 200, 400)).status_code)

    async def samples(self) -> str:
        body = self._body(n=self._rng.randint(2, 5), logprobs=self._rng.randint(0, 9), echo=self._rng.random() < 0.5)
        return str((await self._post("/v1/completions", body, 200)).status_code)

    async def embeds(self) -> str:
        body = {"input": [self._text(3, 50) for _ in range(self._rng.randint(1, 4))]}
        return str((await self._post("/v1/embeddings", body, 200)).status_code)

    async def stores(self) -> str:
        """A response, and one that goes on with it."""
        first = await self._post("/v1/responses", {"input": self._text(3, 60), "max_output_tokens": 30}, 200)
        if first.status_code != 200:
            return str(first.status_code)
        body = {"input": self._text(3, 9), "max_output_tokens": 9, "previous_response_id": first.json()["id"]}
        return str((await self._post("/v1/responses", body, 200, 404)).status_code)

    async def batches(self) -> str:
        """A file of a few requests: its batch is waited for or cancelled, and all of it is deleted."""
        bodies = [self._body(max_tokens=self._rng.randint(1, 20)) for _ in range(self._rng.randint(1, 6))]
        lines = [{"custom_id": str(i), "method": "POST", "url": "/v1/completions", "body": body}
                 for i, body in enumerate(bodies)]  # fmt: skip
        text = "\n".join(map(json.dumps, lines)).encode()
        sent = await self._http.post("/v1/files", data={"purpose": "batch"}, files={"file": ("lines.jsonl", text)})
        if sent.status_code != 200:
            return str(sent.status_code)
        asked = {"input_file_id": sent.json()["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
        made = await self._post("/v1/batches", asked, 200)
        if made.status_code != 200:
            return str(made.status_code)
        at, until = f"/v1/batches/{made.json()['id']}", time.monotonic() + PATIENCE
        if self._rng.random() < 0.3:
            await self._post(f"{at}/cancel", {}, 200, 400)  # it may be over
        while (found := (await self._http.get(at)).json())["status"] not in OVER:
            if time.monotonic() > until:
                self.wrong = f"a batch is not over: {found}"
                break
            await asyncio.sleep(0.2)
        if found["status"] == "completed" and found["request_counts"]["completed"] != len(lines):
            self.wrong = f"requests of a batch have failed: {found}"
        for name in ("input_file_id", "output_file_id", "error_file_id"):
            if found.get(name):
                await self._http.delete(f"/v1/files/{found[name]}")
        return str(found["status"])


def resident(pid: int) -> tuple[int, int, int]:
    """Bytes of resident memory, open files, threads."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    files = len(list(Path(f"/proc/{pid}/fd").iterdir()))
    return int(status["VmRSS"].split()[0]) * 1024, files, int(status["Threads"])


async def look(http: httpx.AsyncClient, pid: int, began: float) -> Sample:
    text = (await http.get("/metrics")).text
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if line[:1] != "#")
    left = sum(float(value) for name, value in values.items() if name.startswith("phasewise_requests_total"))
    rss, files, threads = resident(pid)
    kv, prefix = (int(float(values[f"phasewise_kv_{kind}_bytes"])) for kind in ("live", "prefix"))
    return Sample(round(time.monotonic() - began, 1), rss, kv, prefix, files, threads, int(left))


async def soak(
    url: str, asked: str, pid: int, args: argparse.Namespace
) -> tuple[list[Sample], Counter[tuple[str, str]], str]:
    """Traffic for so many minutes; samples, of which the first and the last are of a server at rest. `asked`: where
    requests go, the server or its router."""
    seen: Counter[tuple[str, str]] = Counter()
    began, samples = time.monotonic(), []
    until = began + 60 * args.minutes
    limits = httpx.Limits(max_keepalive_connections=0)  # every request on a connection of its own
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE) as watcher:
        samples.append(await look(watcher, pid, began))
        async with httpx.AsyncClient(base_url=asked, timeout=PATIENCE, limits=limits) as http:
            every = [Traffic(http, random.Random(args.seed * 1000 + i), seen) for i in range(args.clients)]
            for each in every if args.everything else ():
                each.with_everything()
            running = asyncio.gather(*(each.go_on(until) for each in every))
            while not running.done():
                await asyncio.wait([running], timeout=EVERY)
                samples.append(await look(watcher, pid, began))
            await running
        wrong = next((each.wrong for each in every if each.wrong), "")
        for _ in range(100):  # what was left behind is cancelled, and its memory goes back
            samples.append(await look(watcher, pid, began))
            if not samples[-1].kv:
                break
            await asyncio.sleep(0.1)
    return samples, seen, wrong


def settled(samples: Sequence[Sample]) -> list[Sample]:
    """Those of the last two thirds of the requests: caches fill with what is asked, not with time."""
    return [s for s in samples if s.requests >= samples[-1].requests / 3]


def rise(samples: Sequence[Sample]) -> float:
    """How much the line through resident memory rises while these are answered, as a share of its mean."""
    last = settled(samples)
    mean_at, mean = (sum(values) / len(last) for values in zip(*((s.requests, s.rss) for s in last)))
    spread = sum((s.requests - mean_at) ** 2 for s in last)
    slope = sum((s.requests - mean_at) * (s.rss - mean) for s in last) / spread
    return slope * (last[-1].requests - last[0].requests) / mean


def faults(samples: Sequence[Sample]) -> list[str]:
    found, third, last = [], settled(samples)[0], samples[-1]
    if (risen := rise(samples)) > BOUND:
        found.append(
            f"resident memory rises by {100 * risen:.1f} % over two thirds of the requests, more than {BOUND:.0%}"
        )
    if last.kv:
        found.append(f"{last.kv} bytes of KV are left behind")
    for name in ("files", "threads"):
        if getattr(last, name) > getattr(third, name) + LEFTOVER:
            found.append(f"{name}: {getattr(third, name)} after a third, {getattr(last, name)} at the end")
    return found


def draw(samples: Sequence[Sample], out: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (upper, lower) = pyplot.subplots(2, 1, figsize=(8, 5), sharex=True)
    minutes = [s.seconds / 60 for s in samples]
    upper.plot(minutes, [s.rss / 2**20 for s in samples], label="resident memory")
    upper.set_ylim(bottom=0)
    lower.plot(minutes, [s.kv / 2**20 for s in samples], label="KV of requests", linewidth=0.7)
    lower.plot(minutes, [s.prefix / 2**20 for s in samples], label="KV of the prefix cache")
    for axes in (upper, lower):
        axes.set_ylabel("MiB")
        axes.legend(loc="lower right")
    lower.set_xlabel("minutes")
    figure.tight_layout()
    figure.savefig(out, dpi=90)


def write(samples: Sequence[Sample], out: Path) -> None:
    with out.open("w", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Sample)])
        writer.writeheader()
        writer.writerows(asdict(sample) for sample in samples)


def report(samples: Sequence[Sample], seen: Counter[tuple[str, str]]) -> str:
    by_kind: dict[str, list[str]] = {}
    for (kind, became), count in sorted(seen.items()):
        by_kind.setdefault(kind, []).append(f"{count} {became}")
    lines = [f"{kind:>12}: {', '.join(parts)}" for kind, parts in by_kind.items()]
    third, last = settled(samples)[0], samples[-1]
    lines.append(
        f"{sum(seen.values())} requests in {last.seconds / 60:.1f} minutes; resident memory {third.rss / 2**20:.0f} "
        f"MiB after a third, {last.rss / 2**20:.0f} MiB at the end (line: {100 * rise(samples):+.2f} % of the mean); "
        f"KV of requests {last.kv} bytes, open files {samples[0].files} -> {last.files}, threads {third.threads} -> "
        f"{last.threads}"
    )
    return "\n".join(lines)


def everything(folder: Path, model: str) -> list[str]:
    """Options for an adapter, for batches, and for what lies below the KV budget; their files are in `folder`."""
    peft.write(folder / "sql", Path(model_path(model)))
    return ["--lora", f"sql={folder}/sql", "--batches", f"{folder}/batches", "--kv-host", "16M",
            "--kv-disk", f"{folder}/kv:32M"]  # fmt: skip


@contextlib.contextmanager
def running(words: Sequence[str]) -> Iterator[subprocess.Popen[str]]:
    """`phasewise WORDS`, once it is there."""
    with subprocess.Popen([sys.executable, "-m", "phasewise", *words], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            if not process.stdout.readline():
                raise SystemExit(1)  # it has said why
            yield process
        finally:
            process.terminate()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("minutes", type=float)
    parser.add_argument("--model", default="pocket")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--csv", type=Path, default=Path("soak.csv"))
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--everything", action="store_true")
    args = parser.parse_args()
    url = f"http://127.0.0.1:{free_port()}"
    with contextlib.ExitStack() as stack:
        more = everything(Path(stack.enter_context(TemporaryDirectory())), args.model) if args.everything else []
        words = ["serve", "--model", args.model, "--name", "pocket", "--port", url.rpartition(":")[2], *OPTIONS, *more]
        process, asked = stack.enter_context(running(words)), url
        if args.everything:
            asked = f"http://127.0.0.1:{free_port()}"
            stack.enter_context(running(["route", "--to", url, "--port", asked.rpartition(":")[2]]))
        samples, seen, wrong = asyncio.run(soak(url, asked, process.pid, args))
    write(samples, args.csv)
    if wrong:
        print(wrong, file=sys.stderr)
        return 1
    if args.plot is not None:
        draw(samples, args.plot)
    print(report(samples, seen))
    found = faults(samples)
    print("\n".join(found) or "flat", file=sys.stderr if found else sys.stdout)
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
