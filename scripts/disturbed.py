"""Whether stored KV and the servers behind a router may fail, once a second, and nothing is lost.

    python scripts/disturbed.py SECONDS [--model pocket] [--dtype float32] [--servers 2] [--clients 6] [--seed 0]

Starts so many `phasewise serve` with KV in memory and on disk below a small budget, and `phasewise route` in front of
them. Clients hold conversations of several turns, greedily, whose answers one undisturbed server has given before. Once
a second one thing goes wrong: a bit of a stored block flips, a block is cut, emptied or removed, another's file lies in
its place, or a server is stopped for a while or killed with SIGKILL and started again on its folder. A client asks
again where a request is refused or breaks off. With kernels for AMX `--dtype bfloat16` has to fail: there a cached
beginning may round otherwise than a computed one (docs/checking.md). Prints what was done and what became of the turns,
and exits with 1 if an answer differs from the undisturbed one, an answer breaks off in silence, or a turn was not
answered in the end.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from phasewise.bench.server import free_port

OPTIONS = ("--max-running", "8", "--kv-bytes", "12M", "--kv-host", "8M")
DISK = "64M"
TURNS, TOKENS, TALKS = 3, 24, 12  # turns of a conversation, tokens of an answer, conversations that there are
STORY = (
    "The old clock in the hall stopped at noon. Nobody in the house had noticed it, for everybody was looking for the "
    "dog. The dog was asleep under the clock and dreamt of a long road by the sea. "
)
AGAIN = 60  # times that a client asks for one turn
EVERY = 1.0  # seconds between two faults
PATIENCE = 120.0  # seconds for an answer
START = 120.0  # seconds for a server


class Broken(Exception):
    """A request that was refused or whose answer broke off."""


@dataclass
class Server:
    """One server on its port and its folder, that can be killed and started again."""

    model: str
    dtype: str
    folder: Path
    port: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        words = ["serve", "--model", self.model, "--name", "it", "--port", str(self.port), "--dtype", self.dtype]
        words += OPTIONS
        words += ["--kv-disk", f"{self.folder}:{DISK}"]
        self.process = phasewise(words)

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()


def phasewise(words: Sequence[str]) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "phasewise", *words]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def wait_for(url: str) -> None:
    """Return once the server answers."""
    until = time.monotonic() + START
    while True:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except OSError:
            if time.monotonic() > until:
                raise SystemExit(f"{url} does not answer after {START:.0f} s") from None
            time.sleep(0.2)


# ---- conversations
def question(talk: int, turn: int) -> str:
    rng = random.Random(f"{talk} {turn}")
    return f"{STORY * (3 if turn == 0 else 1)}({talk}) What happened {rng.choice(['first', 'then', 'at last'])}?"


async def ask(http: httpx.AsyncClient, url: str, messages: list[dict[str, str]], seen: Counter[str]) -> str:
    """The whole answer of a stream. Raises Broken where it ends early, which `seen` counts by how."""
    body = {"model": "it", "messages": messages, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True,
            "stream": True}  # fmt: skip
    said, ended = list[str](), False
    try:
        async with http.stream("POST", f"{url}/v1/chat/completions", json=body) as answer:
            if answer.status_code != 200:
                seen[f"refused with {answer.status_code}"] += 1
                raise Broken
            async for line in answer.aiter_lines():
                if line == "data: [DONE]":
                    ended = True
                elif line.startswith("data: "):
                    event = json.loads(line[6:])
                    if "error" in event:
                        seen["ended with an error"] += 1
                        raise Broken
                    said += [choice["delta"].get("content") or "" for choice in event["choices"]]
    except httpx.HTTPError as error:
        seen[f"broken off ({type(error).__name__})"] += 1
        raise Broken from error
    if not ended:
        seen["ended in silence"] += 1
        raise Broken
    return "".join(said)


async def expected(url: str) -> dict[tuple[int, int], str]:
    """What an undisturbed server says, by conversation and turn."""
    found = {}
    async with httpx.AsyncClient(timeout=PATIENCE) as http:
        for talk in range(TALKS):
            messages = list[dict[str, str]]()
            for turn in range(TURNS):
                messages.append({"role": "user", "content": question(talk, turn)})
                found[talk, turn] = await ask(http, url, messages, Counter())
                messages.append({"role": "assistant", "content": found[talk, turn]})
    return found


async def talk_on(
    url: str, right: dict[tuple[int, int], str], rng: random.Random, until: float, seen: Counter[str]
) -> None:
    """Hold one conversation after another."""
    async with httpx.AsyncClient(timeout=PATIENCE) as http:
        while time.monotonic() < until:
            talk, messages = rng.randrange(TALKS), list[dict[str, str]]()
            for turn in range(TURNS):
                messages.append({"role": "user", "content": question(talk, turn)})
                answer = await insist(http, url, messages, seen)
                if answer is None:
                    seen["never answered"] += 1
                    return
                seen["right" if answer == right[talk, turn] else "WRONG"] += 1
                messages.append({"role": "assistant", "content": right[talk, turn]})


async def insist(
    http: httpx.AsyncClient, url: str, messages: list[dict[str, str]], seen: Counter[str]
) -> str | None:  # fmt: skip
    for _ in range(AGAIN):
        try:
            return await ask(http, url, messages, seen)
        except Broken:
            await asyncio.sleep(0.3)
    return None


# ---- what goes wrong
class Saboteur:
    """Does one thing a second; `done` counts them."""

    def __init__(self, servers: Sequence[Server], rng: random.Random) -> None:
        self.servers, self.rng, self.done = servers, rng, Counter[str]()

    async def go_on(self, until: float) -> None:
        while time.monotonic() < until:
            await asyncio.sleep(EVERY)
            server = self.rng.choice(self.servers)
            does: Callable[[Server], bool] = self.rng.choice(
                [self.flips, self.cuts, self.empties, self.removes, self.swaps, self.stops, self.kills]
            )
            if await asyncio.to_thread(does, server):
                self.done[does.__name__] += 1

    def blocks(self, server: Server) -> list[Path]:
        return [
            path for path in server.folder.rglob("*") if path.is_file() and path.parent.parent != server.folder.parent
        ]

    def _block(self, server: Server) -> Path | None:
        found = [path for path in self.blocks(server) if path.stat().st_size > 64]
        return self.rng.choice(found) if found else None

    def flips(self, server: Server) -> bool:
        with contextlib.suppress(OSError):  # it may have gone since
            if (path := self._block(server)) is not None:
                data = bytearray(path.read_bytes())
                data[self.rng.randrange(len(data))] ^= 1 << self.rng.randrange(8)
                path.write_bytes(data)
                return True
        return False

    def cuts(self, server: Server) -> bool:
        with contextlib.suppress(OSError):
            if (path := self._block(server)) is not None:
                os.truncate(path, self.rng.randrange(path.stat().st_size))
                return True
        return False

    def empties(self, server: Server) -> bool:
        with contextlib.suppress(OSError):
            if (path := self._block(server)) is not None:
                path.write_bytes(bytes(path.stat().st_size))
                return True
        return False

    def removes(self, server: Server) -> bool:
        with contextlib.suppress(OSError):
            if (path := self._block(server)) is not None:
                path.unlink()
                return True
        return False

    def swaps(self, server: Server) -> bool:
        """Another block's file in the place of one."""
        with contextlib.suppress(OSError):
            one, other = self._block(server), self._block(server)
            if one is not None and other is not None and one != other:
                one.write_bytes(other.read_bytes())
                return True
        return False

    def stops(self, server: Server) -> bool:
        assert server.process is not None
        server.process.send_signal(signal.SIGSTOP)
        time.sleep(0.7)
        server.process.send_signal(signal.SIGCONT)
        return True

    def kills(self, server: Server) -> bool:
        """Only while another one answers."""
        others = [other for other in self.servers if other is not server]
        if not any(answers(other.url) for other in others):
            return False
        server.kill()
        server.start()
        return True


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=2):
            return True
    except OSError:
        return False


@contextlib.contextmanager
def running(model: str, dtype: str, count: int, folder: Path) -> Iterator[tuple[list[Server], str]]:
    """Servers, and the URL of the router in front of them."""
    servers = [Server(model, dtype, folder / f"kv{i}") for i in range(count)]
    port = free_port()
    router: subprocess.Popen[bytes] | None = None
    try:
        for server in servers:
            server.start()
        for server in servers:
            wait_for(server.url)
        router = phasewise(["route", "--port", str(port), *(f"--to={server.url}" for server in servers)])
        wait_for(f"http://127.0.0.1:{port}")
        yield servers, f"http://127.0.0.1:{port}"
    finally:
        for process in (router, *(server.process for server in servers)):
            if process is not None:
                process.kill()
                process.wait()


async def disturb(servers: Sequence[Server], url: str, args: argparse.Namespace) -> tuple[Counter[str], Counter[str]]:
    right = await expected(servers[0].url)
    until, seen = time.monotonic() + args.seconds, Counter[str]()
    saboteur = Saboteur(servers, random.Random(args.seed))
    clients = [talk_on(url, right, random.Random(f"{args.seed} {i}"), until, seen) for i in range(args.clients)]
    await asyncio.gather(saboteur.go_on(until), *clients)
    return saboteur.done, seen


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seconds", type=float)
    parser.add_argument("--model", default="pocket")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        running(args.model, args.dtype, args.servers, Path(folder)) as (servers, url),
    ):
        done, seen = asyncio.run(disturb(servers, url, args))
    print("done: " + ", ".join(f"{count} {what}" for what, count in sorted(done.items())))
    print("turns: " + ", ".join(f"{count} {what}" for what, count in sorted(seen.items())))
    return int(bool(seen["WRONG"] or seen["never answered"] or seen["ended in silence"] or not seen["right"]))


if __name__ == "__main__":
    sys.exit(main())
