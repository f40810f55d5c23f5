"""A conversation's second turn after a restart: the time to its first token with KV from disk and computed, in turns.

    python scripts/kv_restart.py [--model smollm2] [--dtype bfloat16] [--tokens 4096] [--more 64] [--rounds 5]
        [--most 0.333] [--store slab] [--folder DIR]

Every round begins with an empty folder. A server answers the first turn, a prompt of `--tokens` random tokens, and is
stopped. Two new servers, one after the other, answer the second turn: that prompt, and `--more` tokens that stand for
the first answer and the next question. One has the folder, the other computes everything; who begins changes with each
round. Both have answered a short prompt before. The folder's pages are dropped from memory before the second turn, so
blocks are read from the disk. Prints a Markdown table, medians over rounds with their range, and ends with status 1
where loading takes more than `--most` of computing.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import urllib.request
from pathlib import Path
from random import Random

from phasewise.bench.load import measure
from phasewise.bench.server import serving
from phasewise.bench.workloads import Shot
from phasewise.load import config_of

HITS = "phasewise_kv_disk_hits_total"


def ttft(url: str, prompt: list[int]) -> float:
    """Seconds to the first token of a prompt alone."""
    (served,) = measure(url, [Shot(0.0, prompt, 4)], lambda done: None).served
    if served.error is not None or served.trace.ttft is None:
        raise SystemExit(f"error: {served.error}")
    return served.trace.ttft


def dropped(folder: Path) -> int:
    """Have the system forget what it holds in memory of a folder's files. Returns their bytes."""
    total = 0
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            total += path.stat().st_size
    return total


def hits(url: str) -> int:
    """Blocks that a server has taken from its folder."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=5) as answer:
        lines = answer.read().decode().splitlines()
    return next(int(float(line.rpartition(" ")[2])) for line in lines if line.startswith(HITS))


def one_round(args: argparse.Namespace, seed: int, folder: Path) -> dict[str, float]:
    """Seconds of the first turn, and of the second one loaded and computed; `bytes` of the folder."""
    rng, vocab = Random(seed), config_of(args.model).vocab
    first = [rng.randrange(5, vocab) for _ in range(args.tokens)]
    second, warm = first + [rng.randrange(5, vocab) for _ in range(args.more)], [rng.randrange(5, vocab)] * 40
    plain = ["--model", args.model, "--dtype", args.dtype, "--store", args.store, "--draft", "none"]
    kept = [*plain, "--kv-disk", f"{folder}:64G"]
    found = dict[str, float]()
    with serving(kept) as url:
        ttft(url, warm)
        found["first turn"] = ttft(url, first)
    for who in ("loaded", "computed") if seed % 2 else ("computed", "loaded"):
        with serving(kept if who == "loaded" else plain) as url:
            ttft(url, warm)
            if who == "loaded":
                found["bytes"] = dropped(folder)
            found[who] = ttft(url, second)
            if who == "loaded" and hits(url) < args.tokens // 32:
                raise SystemExit(f"error: only {hits(url)} blocks of {args.tokens // 32} came from the folder")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--tokens", type=int, default=4096, help="of the first turn's prompt")
    parser.add_argument("--more", type=int, default=64, help="tokens of the second turn behind it")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--most", type=float, default=1 / 3, help="of computing, that loading may take")
    parser.add_argument("--store", default="slab")
    parser.add_argument("--folder", type=Path, help="where blocks are kept meanwhile; default: a temporary one")
    args = parser.parse_args()
    rounds = []
    for seed in range(args.rounds):
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            rounds.append(one_round(args, seed, Path(folder) / "kv"))
        print(f"round {seed + 1} of {args.rounds}: {rounds[-1]}", file=sys.stderr, flush=True)
    print(f"{args.tokens} and {args.more} tokens, {args.model} in {args.dtype}, store {args.store}, "
          f"{rounds[0]['bytes'] / 2**20:.0f} MB on disk, {args.rounds} rounds\n")  # fmt: skip
    print("| time to first token | seconds |\n|---|---:|")
    for who in ("first turn", "computed", "loaded"):
        values = [each[who] for each in rounds]
        print(f"| {who} | {statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f}) |")
    share = statistics.median(each["loaded"] / each["computed"] for each in rounds)
    print(f"\nLoading takes {share:.2f} of computing (paired, median); at most {args.most:.2f} is asked for.")
    sys.exit(share > args.most)


if __name__ == "__main__":
    main()
