"""What others feel while somebody abuses the server: their p99 beside what it is in peace.

    python scripts/abuse.py [--model pocket] [--seconds 8] [--rate 12] [--rounds 1] [--out FILE.jsonl] [--only NAME,...]

Starts `phasewise serve` and sends it a steady load of short streams; meanwhile a process of its own does one thing
after another that no client should do, four times a second, for so many seconds, with as many seconds of peace in
between. Prints, for every abuse, the p99 of the others' TTFT and of the gaps between their tokens, as times the median
over all windows of peace, and how many of their requests failed; and whether all KV went back. Exits with 1 if a ratio
is above 2, a request of theirs failed, or KV was left. Wants a quiet machine.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shlex
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any
from urllib.parse import urlsplit

from phasewise.bench import machine, report
from phasewise.bench.latency import ServedRequest, percentile
from phasewise.bench.load import measure
from phasewise.bench.server import serving
from phasewise.bench.workloads import Shot

MOST = 2.0  # times the p99 of peace
SETTLE = 1.0  # seconds between two windows
EVERY = 0.25  # seconds between two abuses: without, this would measure who gets the processor
HEAD = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


class Enemy:
    """Somebody at the other end of a socket."""

    def __init__(self, url: str) -> None:
        at = urlsplit(url)
        self._at = (at.hostname or "", at.port or 80)

    def connect(self) -> socket.socket:
        return socket.create_connection(self._at, timeout=30)

    def say(self, text: bytes) -> bytes:
        """The first of what is answered, if anything is."""
        with contextlib.suppress(OSError), self.connect() as line:
            line.sendall(text)
            return line.recv(4096)
        return b""

    def ask(self, body: Any) -> bytes:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        chat = isinstance(body, dict) and "messages" in body
        head = HEAD.replace("/v1/completions", "/v1/chat/completions") if chat else HEAD
        return self.say(f"{head}Content-Length: {len(content)}\r\nConnection: close\r\n\r\n".encode() + content)


def dropped(enemy: Enemy) -> None:
    for _ in range(50):
        with contextlib.suppress(OSError), enemy.connect() as line:
            line.sendall(HEAD[:30].encode())


def deaf(enemy: Enemy) -> None:
    """Asks for a long stream, and reads none of it for a while."""
    body = b'{"prompt": "the fox", "max_tokens": 1000, "stream": true, "ignore_eos": true}'
    with contextlib.suppress(OSError), enemy.connect() as line:
        line.sendall(f"{HEAD}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        time.sleep(2)


def slow(enemy: Enemy) -> None:
    """A hundred requests, a byte at a time."""
    lines = []
    with contextlib.suppress(OSError):
        lines = [enemy.connect() for _ in range(100)]
        for i in range(40):
            for line in lines:
                with contextlib.suppress(OSError):
                    line.sendall(HEAD[i : i + 1].encode())
            time.sleep(0.05)
    for line in lines:
        line.close()


def endless(enemy: Enemy) -> None:
    """A body that has no end, until somebody says so."""
    chunk = b"100000\r\n" + b"a" * 0x100000 + b"\r\n"
    with contextlib.suppress(OSError), enemy.connect() as line:
        line.sendall(f"{HEAD}Transfer-Encoding: chunked\r\n\r\n".encode() + b'10\r\n{"prompt": "aaaa\r\n')
        for _ in range(70):
            line.sendall(chunk)


def asks(*bodies: Any) -> Callable[[Enemy], None]:
    def act(enemy: Enemy) -> None:
        for body in bodies:
            enemy.ask(_whole(body) if isinstance(body, dict) else body)

    return act


def _whole(body: dict[str, Any]) -> dict[str, Any]:
    return {"max_tokens": 4, **body} if "messages" in body else {"prompt": "the", "max_tokens": 4, **body}


def says(*texts: str) -> Callable[[Enemy], None]:
    def act(enemy: Enemy) -> None:
        for text in texts:
            enemy.say(text.encode("latin-1"))

    return act


def garbage(enemy: Enemy) -> None:
    draw = Random(time.time_ns())
    for _ in range(20):
        enemy.ask(draw.randbytes(2000))


RECURSIVE = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}
ABUSES: dict[str, Callable[[Enemy], None]] = {
    "connections dropped": dropped,
    "a client that never reads": deaf,
    "a byte at a time, 100 times": slow,
    "a body that never ends": endless,
    "10 MB of prompt": asks({"prompt": "a" * (10 << 20)}),
    "7 MB of words": asks({"prompt": "the fox " * 900_000}),
    "deep JSON": asks(b'{"prompt": ' + b"[" * 100_000, b'{"prompt": ' + b'{"a":' * 100_000),
    "NaN and infinities": asks(b'{"prompt": "a", "temperature": NaN}', b'{"prompt": "a", "top_p": 1e999}'),
    "no UTF-8": asks(b'{"prompt": "\xff\xfe\xfd"}'),
    "garbage": garbage,
    "a catastrophic expression": asks({"guided_regex": "(a|a)*" * 30 + "b"}),
    "nested counts": asks({"guided_regex": "((((a{1,99}){1,99}){1,99}){1,99})"}),
    "a schema of itself": asks({"guided_json": RECURSIVE}),
    "10^6 values": asks({"guided_json": {"enum": list(range(10**6))}}),
    "10^9 items": asks({"guided_json": {"type": "array", "minItems": 10**9, "items": {"type": "integer"}}}),
    "two lengths": says(f"{HEAD}Content-Length: 0\r\nContent-Length: 5\r\n\r\nhello"),
    "lines in a header": says(f"{HEAD}X-Request-Id: a\r\n {{\"level\": \"x\"}}\r\nContent-Length: 0\r\n\r\n"),
    "a template that never ends": asks(
        {"messages": [{"role": "user", "content": "a"}], "chat_template": "{% for i in range(10**9) %}{% endfor %}"}
    ),
}  # fmt: skip


def attack(name: str, url: str) -> None:
    """Until somebody ends the process."""
    enemy, act = Enemy(url), ABUSES[name]
    while True:
        act(enemy)
        time.sleep(EVERY)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="pocket")
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--rate", type=float, default=12.0, help="requests/s of the others")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", help="names of abuses, separated by commas")
    parser.add_argument("--attack", nargs=2, metavar=("NAME", "URL"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.attack:
        attack(*given.attack)
    names = given.only.split(",") if given.only else list(ABUSES)
    if unknown := [name for name in names if name not in ABUSES]:
        parser.error(f"unknown abuse {unknown[0]!r}: one of {', '.join(ABUSES)}")
    with serving(["--model", given.model, "--draft", "none", "--allow-templates"]) as url:
        return judged(url, names, given)


def judged(url: str, names: Sequence[str], given: argparse.Namespace) -> int:
    draw = Random(0)

    def window() -> dict[str, float]:
        count = int(given.seconds * given.rate)
        shots = [Shot(i / given.rate, [draw.randrange(16, 1000) for _ in range(64)], 32) for i in range(count)]
        found = felt(measure(url, shots, lambda done: None).served)
        time.sleep(SETTLE)
        return found

    window()  # warms up
    peace, rows = window(), list[dict[str, Any]]()
    for _ in range(given.rounds):
        for name in names:
            enemy = subprocess.Popen([sys.executable, __file__, "--attack", name, url])
            during = window()
            assert enemy.poll() is None, f"{name} gave up: {enemy.returncode}"
            enemy.kill()
            enemy.wait()
            before, peace = peace, window()
            rows.append({"abuse": name, "before": before, "during": during, "after": peace})
            about = {"machine": machine.describe(), "command": shlex.join(["python", *sys.argv])}
            report.json_lines([rows[-1] | about], given.out)
            print(f"{name}: {during}", file=sys.stderr, flush=True)
    body, wrong = [], False
    usual = {key: statistics.median(row["after"][key] for row in rows) for key in ("ttft", "gap")}
    for name in names:
        mine = [row for row in rows if row["abuse"] == name]
        times = {key: statistics.median(row["during"][key] for row in mine) / usual[key] for key in usual}
        failed = sum(row["during"]["failed"] for row in mine)
        wrong |= max(times.values()) > MOST or failed > 0
        body.append([name, f"{times['ttft']:.2f}", f"{times['gap']:.2f}", f"{failed:.0f}"])
    left = kv(url)
    print(report.markdown(["abuse", "TTFT p99, times", "gap p99, times", "others' failures"], body))
    print(f"\nin peace, the median: TTFT p99 {1e3 * usual['ttft']:.1f} ms, gap p99 {1e3 * usual['gap']:.1f} ms")
    print(f"KV of requests at the end: {left:.0f} bytes; {machine.cpu()}, {machine.cores()} cores")
    return int(wrong or left > 0)


def felt(served: Sequence[ServedRequest]) -> dict[str, float]:
    """p99 of TTFT and of the gaps between tokens, seconds."""
    good = [one for one in served if one.error is None]
    ttft = percentile([t for one in good if (t := one.trace.ttft) is not None], 0.99)
    gap = percentile([gap for one in good for gap in one.trace.itl], 0.99)
    return {"ttft": ttft or float("inf"), "gap": gap or float("inf"), "failed": float(len(served) - len(good))}


def kv(url: str) -> float:
    """Live KV bytes, once everything has left."""
    deadline, left = time.monotonic() + 60, 1.0
    while left and time.monotonic() < deadline:
        with urllib.request.urlopen(f"{url}/metrics", timeout=30) as answer:
            lines = answer.read().decode().splitlines()
        left = float(next(line for line in lines if line.startswith("phasewise_kv_live_bytes ")).split()[1])
        time.sleep(0.2)
    return left


if __name__ == "__main__":
    sys.exit(main())
