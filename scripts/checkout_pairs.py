"""Two checkouts side by side: what a change costs in plain decoding, under methods, at start-up and in memory.

    git worktree add ../before COMMIT && (cd ../before && python setup.py build_ext --inplace)
    python scripts/checkout_pairs.py ../before . --model smollm2 --rounds 40 [--dtype int8]
    python scripts/checkout_pairs.py ../before . --settings attend=quest --settings store=kivi --tokens 7800
    python scripts/checkout_pairs.py ../before . --model pocket --start --rounds 9

Each checkout runs in a process of its own, with the same packages, and both stay: they take turns of a fraction of a
second, because a machine's memory changes its speed from second to second. With `--settings`, which may be repeated,
steps of decoding behind long prompts are timed under each setting, in one engine of each checkout. `--start` times the
import, `--help` and a server until it has answered its first request, and reads the most memory that it took. Printed
as Markdown: the median of the second's figure over the first's, by turn, with its 95 % interval. Needs a quiet machine.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

WORK = {"decode 1, 100 tokens": (100, 1, 24), "decode 1, 2,000 tokens": (2000, 1, 24),
        "decode 8, 100 tokens": (100, 8, 16), "decode 8, 1,000 tokens": (1000, 8, 12),
        "decode 16, 100 tokens": (100, 16, 10), "prompt of 800": (800, 1, 0)}  # fmt: skip
"""What is timed: tokens of a prompt, requests at once, steps after their first tokens (0: the prompt itself)."""


STEPS = 12  # of decoding, in one turn under a setting
WARM = 2  # rounds before those that count


class Side:
    """The process of one checkout."""

    def __init__(self, where: str, model: str, dtype: str) -> None:
        command = [sys.executable, str(Path(__file__).resolve()), where, where, "--model", model]
        command += ["--dtype", dtype, "--serve"]
        self.process = subprocess.Popen(
            command, env=environment(where), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def seconds(self, work: Any) -> float:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(work) + "\n")
        self.process.stdin.flush()
        said = self.process.stdout.readline()
        if not said:
            raise SystemExit(f"the process of {self.process.args[2]} ended")  # type: ignore[index]
        return float(json.loads(said))


def environment(where: str) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str((Path(where) / "src").resolve())}


def serve(where: str, model: str, dtype: str) -> None:
    """Answer lines of work, the names of `WORK` or settings with their load, with seconds."""
    import torch

    import phasewise
    from phasewise.bench.drive import Bench
    from phasewise.engine.limits import Limits

    assert Path(phasewise.__file__).is_relative_to(Path(where).resolve()), phasewise.__file__
    bench = Bench.load(model, dtype)
    decoding, prompts = bench.engine({}, Limits()), bench.engine({}, Limits(prefix_cache=False))
    vocab, long = bench.model.config.vocab, Long(bench)
    for line in sys.stdin:
        work = json.loads(line)
        with torch.inference_mode():
            if isinstance(work, str):
                length, count, steps = WORK[work]
                spent = timed(decoding if steps else prompts, vocab, length, count, steps)
            else:
                spent = long.seconds(*work)
        print(json.dumps(spent), flush=True)


def added(engine: Any, vocab: int, length: int, count: int, new: int) -> list[Any]:
    """Returns `count` requests, each with a prompt of `length` random tokens, which the engine has not computed yet."""
    from phasewise.request.params import Params
    from phasewise.request.request import Request

    rng = Random(length * count)
    made = [[rng.randrange(vocab) for _ in range(length)] for _ in range(count)]
    requests = [Request(prompt, Params(max_tokens=new, ignore_eos=True)) for prompt in made]
    for request in requests:
        engine.add(request)
    return requests


def timed(engine: Any, vocab: int, length: int, count: int, steps: int) -> float:
    """Seconds of `steps` steps after every request has a token, or until then. Prompts of decoding are found again."""
    began = time.perf_counter()
    requests = added(engine, vocab, length, count, steps + 8)
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


class Long:
    """Requests with long prompts that go on decoding from turn to turn under one setting; another one replaces them."""

    def __init__(self, bench: Any) -> None:
        self.bench, self.engine, self.of = bench, None, None

    def seconds(self, setting: str, length: int, count: int, rounds: int) -> float:
        """Seconds of the next `STEPS` steps; the prompts are computed before."""
        from phasewise.engine.limits import Limits

        if self.of != (setting, length, count):
            self.engine, self.of = None, (setting, length, count)
            methods = dict(each.split("=", 1) for each in setting.split()) if setting != "dense" else {}
            self.engine = self.bench.engine(methods, Limits(kv_bytes=6 << 30, prefix_cache=False))
            new = (rounds + WARM) * STEPS + 8
            requests = added(self.engine, self.bench.model.config.vocab, length, count, new)
            while not all(request.n_out for request in requests):
                self.engine.step()
        began = time.perf_counter()
        for _ in range(STEPS):
            self.engine.step()
        return time.perf_counter() - began


# ---- a program's start
def started(where: str, model: str) -> dict[str, float]:
    """Seconds of the import, of `--help` and of a server until its first answer; the most memory that it took, in MB.

    Processor seconds beside wall seconds of the first two: they hold on a machine that is busy.
    """
    found = {}
    for name, arguments in {
        "import phasewise": ["-c", "import phasewise"],
        "--help": ["-m", "phasewise", "--help"],
    }.items():
        began, before = time.perf_counter(), os.times()
        subprocess.run([sys.executable, *arguments], env=environment(where), check=True, stdout=subprocess.DEVNULL)
        after = os.times()
        found[f"{name}, s"] = time.perf_counter() - began
        found[f"{name}, CPU s"] = sum(after[2:4]) - sum(before[2:4])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    began = time.perf_counter()
    command = [sys.executable, "-m", "phasewise", "serve", "--model", model, "--port", str(port)]
    server = subprocess.Popen(command, env=environment(where), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        body = json.dumps({"model": model, "prompt": "Once upon a time", "max_tokens": 16}).encode()
        asked = urllib.request.Request(
            f"http://127.0.0.1:{port}/v1/completions", body, {"Content-Type": "application/json"}
        )
        while True:
            try:
                with urllib.request.urlopen(asked, timeout=60) as answer:
                    json.load(answer)
                break
            except OSError:
                if server.poll() is not None or time.perf_counter() - began > 120:
                    raise SystemExit(f"{' '.join(command)} of {where} did not answer") from None
                time.sleep(0.02)
        found["serve, first answer, s"] = time.perf_counter() - began
        status = Path(f"/proc/{server.pid}/status").read_text()
        found["serve, most memory, MB"] = int(status.split("VmHWM:")[1].split()[0]) / 1000
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(timeout=60)
    return found


# ---- both, in turns
Row = tuple[list[dict[int, float]], float]  # figures by side and round, and what they are multiplied with to be printed


def in_turns(figure: Callable[[int], float], rounds: int) -> list[dict[int, float]]:
    """A figure of either side, in rounds that begin with each of them by turns."""
    found: list[dict[int, float]] = [{}, {}]
    for number in range(-WARM, rounds):
        for at in (0, 1) if number % 2 else (1, 0):
            seconds = figure(at)
            found[at] |= {number: seconds} if number >= 0 else {}
    return found


def stepped(args: argparse.Namespace) -> Iterator[tuple[str, Row]]:
    """Times steps of decoding and prompts: of plain engines, or under each of the settings."""
    sides = [Side(where, args.model, args.dtype) for where in args.checkouts]
    try:
        if not args.settings:
            for work, (_, _, steps) in WORK.items():
                yield work, (in_turns(lambda at, work=work: sides[at].seconds(work), args.rounds), 1000 / max(steps, 1))
        for setting in args.settings:
            asked = [setting, args.tokens, args.requests, args.rounds]
            yield setting, (in_turns(lambda at, asked=asked: sides[at].seconds(asked), args.rounds), 1000 / STEPS)
    finally:
        for side in sides:
            side.process.kill()


def starts(args: argparse.Namespace) -> Iterator[tuple[str, Row]]:
    """Starts each checkout's program in turn."""
    found: dict[str, list[dict[int, float]]] = {}
    for number in range(-1, args.rounds):  # the first ones fill the page cache
        for at in (0, 1) if number % 2 else (1, 0):
            for name, figure in started(args.checkouts[at], args.model).items():
                found.setdefault(name, [{}, {}])[at] |= {number: figure} if number >= 0 else {}
        print(f"start {number + 1} of {args.rounds}", file=sys.stderr, flush=True)
    yield from ((name, (figures, 1.0)) for name, figures in found.items())


def line(name: str, row: Row) -> list[str]:
    """Returns a row of the table that is printed."""
    from phasewise.bench.rounds import interval, median, ratio

    (before, after), scale = row
    low, high = interval(after, before) or (float("nan"), float("nan"))
    of = ratio(after, before)
    assert of is not None
    times = [f"{scale * (median(one) or 0):.2f}" for one in (before, after)]
    return [name, *times, f"{of.median:.3f}", f"{low:.3f} to {high:.3f}"]


def arguments() -> argparse.Namespace:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("checkouts", nargs=2, metavar="DIR", help="the one before, the one after")
    asked.add_argument("--model", default="smollm2")
    asked.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "int8"], help="of the steps that are timed")
    asked.add_argument("--rounds", type=int, default=40)
    asked.add_argument("--settings", action="append", default=[], metavar="'VERB=METHOD ...'", help="or `dense`")
    asked.add_argument("--tokens", type=int, default=7800, help="of each prompt, with --settings")
    asked.add_argument("--requests", type=int, default=1, help="at once, with --settings")
    asked.add_argument("--start", action="store_true", help="time the program's start instead, and its memory")
    asked.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    return asked.parse_args()


def main() -> None:
    args = arguments()
    if args.serve:
        serve(args.checkouts[0], args.model, args.dtype)
        return
    from phasewise.bench import report
    from phasewise.bench.machine import describe

    body = []
    for name, row in starts(args) if args.start else stepped(args):
        body.append(line(name, row))
        print(body[-1], file=sys.stderr, flush=True)
    about = describe()
    behind = f", {args.requests} x {args.tokens} tokens" if args.settings else ""
    print(f"{args.model}, {args.dtype}{behind}, {args.rounds} rounds; {about['cpu']}, {about['threads']} threads.\n")
    first = "before" if args.start else "before, ms a step"
    print(report.markdown(["what", first, "after", "after / before", "95 %"], body))


if __name__ == "__main__":
    main()
