"""What the playground and its event stream cost the engine: the same requests to servers that differ in nothing else.

    python scripts/playground_cost.py --model smollm2 [--dtype bfloat16] [--rounds 15] [--batch 8] [--new 128]
        [-- OPTIONS OF phasewise serve]

Four contenders, in turns, each round in another order, each with the same prompts of 128 tokens at once:

    without         `--no-playground`, and nobody listens to its events
    without, again  another server like it: what two equal servers differ by is no cost
    nobody looks    the page is served, and nobody looks
    one looks       a process reads all of its events, as an open page does (and draws nothing)

All servers run the whole time; those whose turn it is not have nothing to do. Prints a Markdown table: the median
time of an answer's tokens (TPOT) and of the whole round, against `without`, paired by round, with 95 % intervals of the
medians; then whether the cost of a page that nobody looks at is certainly below 1 %. What listening costs at most
depends on the machine's cores: the reader needs a part of one.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from random import Random

from phasewise.bench.load import measure
from phasewise.bench.rounds import interval, order, ratio
from phasewise.bench.server import serving
from phasewise.bench.workloads import Shot
from phasewise.errors import UserError

PROMPT, LIMIT = 128, 0.01  # tokens; the share that a page nobody looks at may cost
BASE, AGAIN, UNSEEN, SEEN = "without", "without, again", "nobody looks", "one looks"
FIGURES = ("TPOT, ms", "round, s")
READER = """
import sys, urllib.request
with urllib.request.urlopen(sys.argv[1] + "/events") as stream:
    print(stream.readline().decode().strip(), flush=True)
    for line in stream:
        pass
"""
Found = dict[str, dict[str, dict[int, float]]]  # {figure: {contender: {round: value}}}


@contextmanager
def looking(url: str) -> Iterator[None]:
    """Somebody reads the events of a server, from the first one on."""
    reader = subprocess.Popen([sys.executable, "-c", READER, url], stdout=subprocess.PIPE, text=True)
    assert reader.stdout is not None
    try:
        if (said := reader.stdout.readline().strip()) != "event: hello":
            raise UserError(f"{url}/events does not say hello but {said!r}")
        yield
    finally:
        reader.kill()
        reader.communicate()


def shots(rng: Random, vocab: int, batch: int, new: int) -> list[Shot]:
    return [Shot(0.0, [rng.randrange(5, vocab) for _ in range(PROMPT)], new) for _ in range(batch)]


def one_round(urls: dict[str, str], asked: Sequence[Shot], number: int, found: Found) -> None:
    """Everybody has a turn."""
    for who in order(list(urls), number):
        with ExitStack() as stack:
            if who == SEEN:
                stack.enter_context(looking(urls[who]))
            result = measure(urls[who], asked, lambda done: None)
        for one in result.served:
            if one.error is not None:
                raise UserError(f"{who}: {one.error}")
        times = [one.trace.tpot for one in result.served if one.trace.tpot is not None]
        for figure, value in zip(FIGURES, (1e3 * statistics.median(times), result.seconds)):
            found.setdefault(figure, {}).setdefault(who, {})[number] = value


def table(found: Found) -> list[str]:
    """A row per figure and contender: its median, and its ratio to the server without."""
    lines = ["| figure | contender | median | against without [95 %] |", "|---|---|---:|---:|"]
    for figure, by in found.items():
        for who, values in by.items():
            against = "" if who == BASE else said(values, by[BASE])
            lines.append(f"| {figure} | {who} | {statistics.median(values.values()):.4g} | {against} |")
    return lines


def said(ours: dict[int, float], base: dict[int, float]) -> str:
    middle, ends = ratio(ours, base), interval(ours, base)
    if middle is None:
        return "-"
    return f"{middle.median:.4f}" + (f" [{ends[0]:.4f}, {ends[1]:.4f}]" if ends else "")


def verdict(found: Found) -> str:
    """Of the time per token: certain only if the whole interval says so."""
    by = found[FIGURES[0]]
    ends = interval(by[UNSEEN], by[BASE])
    if ends is None:
        return "Too few rounds for an interval: nothing follows."
    if ends[1] < 1 + LIMIT:
        return f"A page that nobody looks at costs less than {100 * LIMIT:g} % (at most {max(0.0, ends[1] - 1):.2%})."
    if ends[0] > 1 + LIMIT:
        return f"A page that nobody looks at costs more than {100 * LIMIT:g} % (at least {ends[0] - 1:.2%})."
    return f"Not certain: between {ends[0] - 1:+.2%} and {ends[1] - 1:+.2%}; take more rounds, or a quieter machine."


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--vocab", type=int, default=30000, help="token ids of prompts are below this")
    parser.add_argument("options", nargs="*", help="of phasewise serve, after --")
    asked = parser.parse_args(words)
    served = [
        "--model",
        asked.model,
        "--dtype",
        asked.dtype,
        "--no-prefix-cache",
        *(asked.options or ["--draft", "none"]),
    ]
    with ExitStack() as stack:
        urls = {
            who: stack.enter_context(serving([*served, *(["--no-playground"] if who in (BASE, AGAIN) else [])]))
            for who in (BASE, AGAIN, UNSEEN)
        }
        urls[SEEN] = urls[UNSEEN]
        found: Found = {}
        one_round(urls, shots(Random(0), asked.vocab, asked.batch, asked.new), 0, {})  # warm
        for number in range(asked.rounds):
            one_round(urls, shots(Random(number + 1), asked.vocab, asked.batch, asked.new), number, found)
    print("\n".join([*table({figure: {who: by[who] for who in urls} for figure, by in found.items()}), ""]))
    print(verdict(found))


if __name__ == "__main__":
    main()
