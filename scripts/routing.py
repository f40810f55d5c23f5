"""What routing by prefix is worth: a load over several servers behind `phasewise route`, under each of its policies.

    python scripts/routing.py [--workload turns:users=16,turns=6] [--rate 4] [--requests 96] [--servers 2]
        [--model pocket] [--kv-bytes 64M] [--rounds 3]
    python scripts/routing.py --workload mooncake:path=conversation_trace.jsonl,scale=0.05 --rate 4

Servers and the router are started anew for every policy and round, so nothing is cached when a load begins; who begins
changes with each round. `mooncake` is a trace in the format of Mooncake's (arXiv 2407.00079). Prints a Markdown table:
medians over rounds with their range.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from phasewise.bench.server import free_port, serving, wait_ready

POLICIES = ("prefix", "load", "turns")
COLUMNS = {"TTFT, median (s)": "ttft_p50_s", "TTFT, 90 of 100 (s)": "ttft_p90_s", "TPOT, median (s)": "tpot_p50_s"}


@contextlib.contextmanager
def routing(urls: list[str], by: str) -> Iterator[str]:
    """The URL of a router before these servers."""
    port = free_port()
    command = [sys.executable, "-m", "phasewise", "route", "--port", str(port), "--by", by]
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen([*command, *(f"--to={url}" for url in urls)], stdout=errors, stderr=errors)
        try:
            wait_ready(process, url := f"http://127.0.0.1:{port}", errors)
            yield url
        finally:
            process.terminate()
            process.wait(timeout=15)


def load(args: argparse.Namespace, by: str, seed: int, folder: Path) -> dict[str, Any]:
    """The summary of one load under a policy."""
    serve = ["--model", args.model, "--kv-bytes", args.kv_bytes, "--draft", "none"]
    out = folder / f"{by}-{seed}.jsonl"
    asked = ["--workload", args.workload, "--requests", str(args.requests), "--seed", str(seed), "--model", args.model]
    asked += [] if args.rate is None else ["--rate", str(args.rate)]
    with contextlib.ExitStack() as open_servers:
        urls = [open_servers.enter_context(serving(serve)) for _ in range(args.servers)]
        url = open_servers.enter_context(routing(urls, by))
        command = [sys.executable, "-m", "phasewise", "bench", "load", "--url", url, *asked, "--out", str(out)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8").splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", default="turns:users=16,turns=6")
    parser.add_argument("--rate", type=float, help="requests per second; default: 1, or a trace's own times")
    parser.add_argument("--requests", type=int, default=96)
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--model", default="pocket")
    parser.add_argument("--kv-bytes", default="64M", help="of each server")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    rows: dict[str, list[dict[str, Any]]] = {by: [] for by in POLICIES}
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(args.rounds):
            order = POLICIES[seed % len(POLICIES) :] + POLICIES[: seed % len(POLICIES)]
            for by in order:
                rows[by].append(load(args, by, seed, Path(folder)))
                print(f"round {seed + 1} of {args.rounds}, {by}: {rows[by][-1]}", file=sys.stderr, flush=True)
    first, each = rows["prefix"][0], args.requests
    print(f"{args.model}, {args.servers} servers, {args.workload}, {first['rate']:g} requests/s, {each} requests of "
          f"{first['prompt_tokens'] / each:.0f} prompt tokens, on {first['machine']['cpu']}\n")  # fmt: skip
    print(f"| routed by | prompt tokens found in caches | {' | '.join(COLUMNS)} |\n|---|---:|{'---:|' * len(COLUMNS)}")
    for by, found in rows.items():
        shares = [row["prefix_hits"] / row["prompt_tokens"] for row in found]
        cells = [
            f"{statistics.median(shares):.0%}",
            *(_spread([row[key] for row in found]) for key in COLUMNS.values()),
        ]
        print(f"| {by} | {' | '.join(cells)} |")


def _spread(values: list[float]) -> str:
    return f"{statistics.median(values):.3g} ({min(values):.3g} to {max(values):.3g})"


if __name__ == "__main__":
    main()
