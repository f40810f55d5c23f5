"""Two sets of CPU kernels side by side on one machine: how fast prompts and generated tokens are with each.

    python scripts/kernel_pairs.py avx512 avx512_fma --model smollm2 --rounds 5

Kernels are chosen once in a process, so every round is a process for each, in turns. Printed as Markdown: medians, and
the median ratio of the rounds (range). Needs a quiet machine.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from statistics import median

NEW = 32  # tokens of an answer
WORK = {"prompt of 800": (800, 1, 1), "prompt of 4,000": (4000, 1, 1), "decode 1": (64, 1, NEW),
        "decode 8": (64, 8, NEW), "decode 16": (64, 16, NEW)}  # fmt: skip
"""What is timed: tokens of a prompt, prompts at once, tokens of an answer."""


def rates(model: str) -> dict[str, float]:
    """Tokens a second of each kind of work: a prompt's, or those after the first of each answer."""
    from random import Random

    from phasewise import LLM
    from phasewise.engine.limits import Limits

    llm, rng, found = LLM(model, dtype="bfloat16", limits=Limits(prefix_cache=False)), Random(0), {}
    vocab = llm.model.config.vocab

    def seconds(length: int, count: int, new: int) -> float:
        prompts = [[rng.randrange(vocab) for _ in range(length)] for _ in range(count)]
        began = time.perf_counter()
        llm.generate(prompts, max_tokens=new, ignore_eos=True)
        return time.perf_counter() - began

    seconds(64, 1, 4)
    for name, (length, count, new) in WORK.items():
        first = seconds(length, count, 1)
        found[name] = length * count / first if new == 1 else (new - 1) * count / (seconds(length, count, new) - first)
    return found


def child(kernels: str, model: str) -> dict[str, float]:
    command = [sys.executable, __file__, kernels, kernels, "--model", model, "--one"]
    done = subprocess.run(command, env=os.environ | {"PHASEWISE_KERNELS": kernels}, stdout=subprocess.PIPE, check=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("kernels", nargs=2, metavar="KERNELS", help="names of PHASEWISE_KERNELS")
    asked.add_argument("--model", default="smollm2")
    asked.add_argument("--rounds", type=int, default=5)
    asked.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    given = asked.parse_args()
    if given.one:
        print(json.dumps(rates(given.model)))
        return
    from phasewise.bench.machine import describe

    before, after = given.kernels
    rounds = []
    for i in range(given.rounds):
        pair = (before, after) if i % 2 else (after, before)
        rounds.append({name: child(name, given.model) for name in pair})
    about = describe()
    print(f"{given.model}, bfloat16, {given.rounds} rounds; {about['cpu']}, {about['threads']} threads.\n")
    print(f"| tokens/s | {before} | {after} | times as fast (range) |\n|---|---:|---:|---:|")
    for work in WORK:
        each = [(one[before][work], one[after][work]) for one in rounds]
        ratios = [b / a for a, b in each]
        a, b = (median(side) for side in zip(*each, strict=True))
        print(f"| {work} | {a:,.0f} | {b:,.0f} | {median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}) |")


if __name__ == "__main__":
    main()
