"""Plain decoding and prompts of two checkouts side by side: what a change costs those who ask for no method.

    git worktree add ../before COMMIT && (cd ../before && python setup.py build_ext --inplace)
    python scripts/checkout_pairs.py ../before . --model smollm2 --rounds 40

Each checkout runs in a process of its own, with the same packages, and both stay: they take turns of a fraction of a
second, because a machine's memory changes its speed from second to second. Printed as Markdown: the median of the
second's time over the first's, by turn, with its 95 % interval. Needs a quiet machine.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from random import Random
from typing import Any

WORK = {"decode 1, 100 tokens": (100, 1, 24), "decode 1, 2,000 tokens": (2000, 1, 24),
        "decode 8, 100 tokens": (100, 8, 16), "decode 8, 1,000 tokens": (1000, 8, 12),
        "decode 16, 100 tokens": (100, 16, 10), "prompt of 800": (800, 1, 0)}  # fmt: skip
"""What is timed: tokens of a prompt, requests at once, steps after their first tokens (0: the prompt itself)."""


class Side:
    """The process of one checkout."""

    def __init__(self, where: str, model: str) -> None:
        command = [sys.executable, str(Path(__file__).resolve()), where, where, "--model", model, "--serve"]
        env = os.environ | {"PYTHONPATH": str((Path(where) / "src").resolve())}
        self.process = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def seconds(self, work: str) -> float:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(work) + "\n")
        self.process.stdin.flush()
        said = self.process.stdout.readline()
        if not said:
            raise SystemExit(f"the process of {self.process.args[2]} ended")  # type: ignore[index]
        return float(json.loads(said))


def serve(where: str, model: str) -> None:
    import torch

    import phasewise
    from phasewise.bench.drive import Bench
    from phasewise.engine.limits import Limits

    assert Path(phasewise.__file__).is_relative_to(Path(where).resolve()), phasewise.__file__
    bench = Bench.load(model, "bfloat16")
    decoding, prompts = bench.engine({}, Limits()), bench.engine({}, Limits(prefix_cache=False))
    for line in sys.stdin:
        length, count, steps = WORK[json.loads(line)]
        with torch.inference_mode():
            spent = timed(decoding if steps else prompts, bench.model.config.vocab, length, count, steps)
        print(json.dumps(spent), flush=True)


def timed(engine: Any, vocab: int, length: int, count: int, steps: int) -> float:
    """Seconds of `steps` steps after every request has a token, or until then. Prompts of decoding are found again."""
    from phasewise.request.params import Params
    from phasewise.request.request import Request

    rng = Random(length * count)
    made = [[rng.randrange(vocab) for _ in range(length)] for _ in range(count)]
    requests = [Request(prompt, Params(max_tokens=steps + 8, ignore_eos=True)) for prompt in made]
    began = time.perf_counter()
    for request in requests:
        engine.add(request)
    while not all(request.n_out for request in requests):
        engine.step()
    if steps:
        began = time.perf_counter()
        for _ in range(steps):
            engine.step()
    spent = time.perf_counter() - began
    for request in requests:
        engine.cancel(request)
    return spent


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("checkouts", nargs=2, metavar="DIR", help="the one before, the one after")
    asked.add_argument("--model", default="smollm2")
    asked.add_argument("--rounds", type=int, default=40)
    asked.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    given = asked.parse_args()
    if given.serve:
        serve(given.checkouts[0], given.model)
        return
    from phasewise.bench import report
    from phasewise.bench.machine import describe
    from phasewise.bench.rounds import interval, median, ratio

    sides = [Side(where, given.model) for where in given.checkouts]
    body = []
    for work in WORK:
        found: list[dict[int, float]] = [{}, {}]
        for number in range(-2, given.rounds):  # the first ones warm up
            for at in (0, 1) if number % 2 else (1, 0):
                seconds = sides[at].seconds(work)
                found[at] |= {number: seconds} if number >= 0 else {}
        between = interval(found[1], found[0])
        low, high = between or (float("nan"), float("nan"))
        times = [f"{1000 * (median(one) or 0) / max(WORK[work][2], 1):.2f}" for one in found]
        of = ratio(found[1], found[0])
        assert of is not None
        body.append([work, *times, f"{of.median:.3f}", f"{low:.3f} to {high:.3f}"])
        print(body[-1], file=sys.stderr, flush=True)
    for side in sides:
        side.process.kill()
    about = describe()
    print(f"{given.model}, bfloat16, {given.rounds} rounds; {about['cpu']}, {about['threads']} threads.\n")
    print(report.markdown(["work", "before, ms a step", "after", "times before's time", "95 %"], body))


if __name__ == "__main__":
    main()
