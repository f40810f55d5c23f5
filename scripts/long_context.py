"""What a long context costs: prefill inside the memory budget, and decoding whose time grows with the KV it reads.

    python scripts/long_context.py [--model DIR] [--dtype bfloat16|int8] [--lengths 1024,2048,4096,8192,16384,32768]
                                   [--new 32] [--rounds 3] [--kv-bytes 1G] [--seed 0]

One request per length, random tokens, an engine each. First every prompt is computed: time, the most KV bytes in use
against the hard budget, and the most memory of the process meanwhile (weights and the KV of the lengths before
included; where the system cannot reset that number, since the start). Then all of them decode in interleaved rounds:
`new` tokens a round after one that is not timed, medians of all. The fit is t = t0 + bytes / B over the lengths, by
least squares of relative errors. A checkpoint whose max_position_embeddings is too small is measured all the same, as a
copy that claims more: positions beyond those it was trained for cost as much as others. Prints two Markdown tables;
progress goes to stderr.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from phasewise.bench import machine, report
from phasewise.bench.drive import Bench
from phasewise.bench.prompts import random_prompts
from phasewise.bench.rounds import order
from phasewise.cli.options import parse_bytes
from phasewise.cli.progress import counting, working
from phasewise.engine.assembly import kv_shapes
from phasewise.engine.limits import Limits
from phasewise.errors import UserError
from phasewise.kv.format import Raw, entry_bytes
from phasewise.load import model_path
from phasewise.model.hub import resolve
from phasewise.model.model import Model
from phasewise.request.params import Params
from phasewise.request.request import Request
from phasewise.verbs.place import Placed

CONFIG = "config.json"
POSITIONS = "max_position_embeddings"


@dataclass
class Long:
    """A request of one length on an engine of its own, and what it has cost so far."""

    engine: Placed
    request: Request
    prefill: float = 0.0  # seconds, the first token included
    peak_kv: int = 0
    peak_rss: int = 0
    steps: list[float] = field(default_factory=list)  # seconds of every timed token
    read: list[int] = field(default_factory=list)  # KV bytes that each of them read ...
    seen: list[int] = field(default_factory=list)  # ... and the tokens it saw, itself included

    @property
    def length(self) -> int:
        return self.request.prompt_len

    @property
    def seconds(self) -> float:
        """Of a token, the median."""
        return statistics.median(self.steps)

    @property
    def kv_bytes(self) -> float:
        """Read for a token, the mean."""
        return statistics.fmean(self.read)

    def compute_prompt(self, tell: Callable[[int], object]) -> None:
        forget_peak()
        start = time.perf_counter()
        self.engine.add(self.request)
        while not self.request.n_out and self.request.left is None:
            self._step()
            tell(self.request.computed)
        self.prefill = time.perf_counter() - start
        self.peak_rss = machine.peak_rss()

    def decode(self, tokens: int) -> None:
        """One token to find the caches again, and `tokens` that count."""
        self._step()
        for _ in range(tokens):
            self.seen.append(self.request.known)
            before, start = self.engine.counters.kv_bytes_read, time.perf_counter()
            self._step()
            self.steps.append(time.perf_counter() - start)
            self.read.append(self.engine.counters.kv_bytes_read - before)

    def _step(self) -> None:
        self.engine.step()
        if self.request.left is not None and self.request.left.how != "finished":
            raise UserError(f"the request of {self.length} tokens failed: {self.request.left.reason}")
        self.peak_kv = max(self.peak_kv, self.engine.kv_bytes)


def main(argv: Sequence[str] | None = None) -> None:
    asked = arguments(argv)
    budget = parse_bytes(asked.kv_bytes)
    new = 1 + asked.rounds * (asked.new + 1)
    with stretched(asked.model, max(asked.lengths) + new) as (path, note):
        with working(f"loading {asked.model}"):
            bench = Bench.load(path, asked.dtype)
        found = measured(bench, asked, budget, new)
    about = machine.describe()
    print(f"{asked.model}, {asked.dtype or 'own dtype'}, {report.size(bench.model.weight_bytes)} of weights{note}; "
          f"{about['cpu']}, {about['threads']} threads; KV budget {report.size(budget)}; decoded in "
          f"{asked.rounds} rounds of {asked.new} tokens, seed {asked.seed}\n")  # fmt: skip
    print(prefills(found, budget) + "\n")
    print(decodes(found, bench.model))


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    def whole(text: str) -> list[int]:
        return [int(word) for word in text.split(",")]

    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="pocket")
    parser.add_argument("--dtype", help="default: the checkpoint's own")
    parser.add_argument("--lengths", type=whole, default=[1024 << i for i in range(6)], help="prompt tokens, ascending")
    parser.add_argument("--new", type=int, default=32, help="tokens decoded per round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kv-bytes", default="1G", help="hard KV budget of a request")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(argv)


@contextmanager
def stretched(name: str, context: int) -> Iterator[tuple[str, str]]:
    """The model's directory, or, if its context is shorter, a copy that claims `context`; and a note that says so."""
    directory = resolve(model_path(name)).resolve()
    config = json.loads((directory / CONFIG).read_text(encoding="utf-8"))
    trained = config.get(POSITIONS, context)
    if trained >= context:
        yield str(directory), ""
        return
    with TemporaryDirectory(prefix="phasewise-long-") as copy:
        for file in directory.iterdir():
            if file.name != CONFIG:
                (Path(copy) / file.name).symlink_to(file)
        (Path(copy) / CONFIG).write_text(json.dumps({**config, POSITIONS: context}), encoding="utf-8")
        yield copy, f", {POSITIONS} lifted from {trained:,} to {context:,} in a copy"


def forget_peak() -> None:
    """Let `machine.peak_rss` count from now on, where the system can."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return


def measured(bench: Bench, asked: argparse.Namespace, budget: int, new: int) -> list[Long]:
    prompts = random_prompts(bench.model.config.vocab, asked.seed)
    limits = Limits(budget, max_running=1, prefix_cache=False)
    warm = Long(bench.engine({}, limits), Request(prompts(min(asked.lengths)), Params(max_tokens=8, ignore_eos=True)))
    warm.compute_prompt(lambda done: None)
    warm.decode(4)
    found: list[Long] = []
    for length in asked.lengths:
        request = Request(prompts(length), Params(max_tokens=new, ignore_eos=True))
        found.append(Long(bench.engine({}, limits), request))
        with counting(f"prompt of {length:,} tokens", length) as tell:
            found[-1].compute_prompt(tell)
    with counting("rounds of decoding", asked.rounds * len(found)) as tell:
        for number in range(asked.rounds):
            for done, one in enumerate(order(found, number), 1):
                one.decode(asked.new)
                tell(number * len(found) + done)
    return found


def prefills(found: Sequence[Long], budget: int) -> str:
    header = ["prompt", "seconds", "tokens/s", "KV at most", "of the budget", "memory at most"]
    return report.markdown(header, [
        [f"{one.length:,}", report.short(one.prefill), report.short(one.length / one.prefill),
         report.size(one.peak_kv), f"{one.peak_kv / budget:.1%}", report.size(one.peak_rss)]
        for one in found
    ])  # fmt: skip


def decodes(found: Sequence[Long], model: Model) -> str:
    """The table, what the counter says, and the fit."""
    start, rate, off = fit(found)
    header = ["prompt", "time per token", "KV read per token", "t0 + bytes / B", "off"]
    table = report.markdown(header, [
        [f"{one.length:,}", report.milliseconds(one.seconds), report.size(one.kv_bytes),
         report.milliseconds(start + one.kv_bytes * rate), f"{miss:+.1%}"]
        for one, miss in zip(found, off)
    ])  # fmt: skip
    each = row_bytes(model)
    exact = all(one.read == [each * seen for seen in one.seen] for one in found)
    words = [f"KV read per token: {'exactly' if exact else 'NOT'} {each:,} bytes times the tokens it sees."]
    if len(found) > 1:
        speed = f"{1e-9 / rate:.2f} GB/s" if rate > 0 else "unbounded (time does not grow)"
        worst = max(abs(miss) for miss in off)
        words.append(f"Fit: t0 = {report.milliseconds(start)}, B = {speed}; at most {worst:.1%} off.")
    return f"{table}\n\n{' '.join(words)}"


def row_bytes(model: Model) -> int:
    """KV bytes of one token in all layers."""
    return sum(entry_bytes(Raw(), shape) * shape.heads for shape in kv_shapes(model))


def fit(found: Sequence[Long]) -> tuple[float, float, list[float]]:
    """Seconds of a token that reads no KV, seconds per byte, and each length's relative error."""
    seconds, read = np.array([one.seconds for one in found]), np.array([one.kv_bytes for one in found])
    lines = np.stack((np.ones_like(read), read), 1) / seconds[:, None]
    start, rate = np.linalg.lstsq(lines, np.ones_like(read), rcond=None)[0] if len(found) > 1 else (seconds[0], 0.0)
    return float(start), float(rate), list(seconds / (start + rate * read) - 1)


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
