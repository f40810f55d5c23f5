"""What HTTP costs: the same requests to the engine in this process and to servers on this machine, in turns.

    python scripts/http_cost.py --model DIR [--dtype bfloat16] [--rounds 5] [--batches 1,16] [--new 128] [--burst 32]
        [--url llama.cpp=http://127.0.0.1:8080 ...] [-- OPTIONS OF phasewise serve]

A server of our own is started, and stopped at the end; servers of others must run, with the same checkpoint. All get
the same prompts of 128 tokens from one client, which is that of `phasewise bench load`; `--draft none` unless the
options say otherwise. Prints a Markdown table, medians over rounds (with their range): for each batch the tokens/s of
decoding (batch / median time between two tokens), of the burst (prompts of 16 to 512 tokens, answers of 8 to 128, all
at once) the tokens/s in all, and the time to the first token of one request alone.
"""

from __future__ import annotations

import argparse
import gc
import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from random import Random

from phasewise.bench.drive import Bench, drive
from phasewise.bench.latency import ServedRequest
from phasewise.bench.load import measure
from phasewise.bench.server import serving
from phasewise.bench.workloads import Shot
from phasewise.engine.limits import Limits

PROMPT = 128
Run = Callable[[Sequence[Shot]], tuple[list[ServedRequest], float]]
Figures = dict[str, dict[str, list[float]]]  # {row: {contender: a figure a round}}


def shots(rng: Random, count: int, new: int | None, vocab: int) -> list[Shot]:
    """So many requests at once; of many lengths where `new` is None."""
    if new is not None:
        return [Shot(0.0, [rng.randrange(5, vocab) for _ in range(PROMPT)], new) for _ in range(count)]
    sizes = [(int(2 ** rng.uniform(4, 9)), int(2 ** rng.uniform(3, 7))) for _ in range(count)]
    return [Shot(0.0, [rng.randrange(5, vocab) for _ in range(prompt)], answer) for prompt, answer in sizes]


def checked(served: list[ServedRequest], who: str) -> list[ServedRequest]:
    for one in served:
        if one.error is not None:
            raise SystemExit(f"error: {who}: {one.error}")
    return served


def per_token(served: Sequence[ServedRequest]) -> float:
    """The median time between two tokens of an answer, in seconds: prompts that share a step are no decoding."""
    return statistics.median(gap for one in served for gap in one.trace.itl)


def one_round(contenders: dict[str, Run], rng: Random, args: argparse.Namespace, figures: Figures) -> None:
    for batch in args.batches:
        asked = shots(rng, batch, args.new, args.vocab)
        for who, run in contenders.items():
            served = checked(run(asked)[0], who)
            figures.setdefault(f"decode {batch}, tokens/s", {}).setdefault(who, []).append(batch / per_token(served))
            if batch == 1:
                ttft = served[0].trace.ttft
                assert ttft is not None
                figures.setdefault("TTFT alone, ms", {}).setdefault(who, []).append(1e3 * ttft)
    asked = shots(rng, args.burst, None, args.vocab)
    for who, run in contenders.items():
        served, seconds = run(asked)
        tokens = sum(one.new_tokens for one in checked(served, who))
        figures.setdefault(f"burst of {args.burst}, tokens/s", {}).setdefault(who, []).append(tokens / seconds)


def table(figures: Figures, contenders: Sequence[str], batches: Sequence[int]) -> str:
    lines = [f"| | {' | '.join(contenders)} |", f"|---|{'---:|' * len(contenders)}"]
    for row, found in figures.items():
        cells = [f"{statistics.median(v):,.1f} ({min(v):,.0f} to {max(v):,.0f})" for v in found.values()]
        lines.append(f"| {row} | {' | '.join(cells)} |")
    inside, over = contenders[:2]
    for batch in batches:
        pairs = list(zip(*(figures[f"decode {batch}, tokens/s"][who] for who in (inside, over))))
        ratio = statistics.median(b / a for a, b in pairs)
        more = statistics.median(1e3 * batch * (1 / b - 1 / a) for a, b in pairs)
        lines.append(f"\nDecode {batch}: {ratio:.2f} of the engine alone, {more:.2f} ms a step more (paired, median).")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batches", type=lambda s: [int(n) for n in s.split(",")], default=[1, 16])
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--burst", type=int, default=32)
    parser.add_argument("--url", action="append", default=[], metavar="NAME=URL")
    parser.add_argument("options", nargs="*", help="of phasewise serve, after --")
    args = parser.parse_args()
    limits = Limits(None, 64, prefix_cache=False)
    bench = Bench.load(args.model, args.dtype)
    engine, args.vocab = bench.engine({}, limits), bench.model.config.vocab
    served = ["--model", args.model, "--dtype", args.dtype, "--no-prefix-cache", *(args.options or ["--draft", "none"])]

    def inside(asked: Sequence[Shot]) -> tuple[list[ServedRequest], float]:
        run = drive(engine, asked)
        return run.served, run.seconds

    def at(url: str) -> Run:
        def over(asked: Sequence[Shot]) -> tuple[list[ServedRequest], float]:
            result = measure(url, asked, lambda done: None)
            return result.served, result.seconds

        return over

    with ExitStack() as stack:
        contenders: dict[str, Run] = {"engine alone": inside, "phasewise": at(stack.enter_context(serving(served)))}
        for named in args.url:
            name, _, url = named.partition("=")
            contenders[name] = at(url.rstrip("/"))
        gc.freeze()
        figures: Figures = {}
        one_round(contenders, Random(0), args, {})  # warm
        for i in range(args.rounds):
            one_round(contenders, Random(i + 1), args, figures)
    print(table(figures, list(contenders), args.batches))


if __name__ == "__main__":
    main()
