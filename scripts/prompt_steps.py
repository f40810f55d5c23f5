"""How long a prompt takes under other methods beside the default ones: its own steps, without what comes after them.

    python scripts/prompt_steps.py decode=block_diffusion [decode=block_diffusion:block=32 ...] [--model smollm2]
                                   [--tokens 500,2000] [--rounds 9]

A time to first token counts what a method does after the prompt, too: block diffusion denoises a whole block before it
shows a token. Here the clock runs from the first step to the one that computes the last row of the prompt, or of those
blocks of it that are whole: what is left of it goes with the first tokens. Settings take turns, in rotating order, on
the same random prompt; no prefix is kept. Needs a quiet machine.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import Any

import torch

from phasewise.bench import machine, report
from phasewise.bench.drive import Bench
from phasewise.bench.prompts import random_prompts
from phasewise.bench.rounds import median, order, ratio
from phasewise.bench.settings import DEFAULT, BenchSetting
from phasewise.engine.limits import Limits
from phasewise.request.params import Params
from phasewise.request.request import Request

HEADER = ["setting", "prompt", "ms", "times the default"]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("settings", nargs="+", type=BenchSetting.parse, metavar="VERB=METHOD")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--tokens", default="500,2000", help="lengths of prompts")
    parser.add_argument("--rounds", type=int, default=9)
    asked = parser.parse_args(argv)
    bench = Bench.load(asked.model, asked.dtype)
    prompts = random_prompts(bench.model.config.vocab, 0)
    settings = [BenchSetting(DEFAULT), *asked.settings]
    engines = {one.name: bench.engine(one.verbs, Limits(prefix_cache=False)) for one in settings}
    body = []
    for tokens in map(int, asked.tokens.split(",")):
        found: dict[str, dict[int, float]] = {name: {} for name in engines}
        for number in range(-1, asked.rounds):  # the first one warms up
            for name in order(list(engines), number + 1):
                seconds = prompt_seconds(engines[name], prompts(tokens))
                found[name] |= {number: seconds} if number >= 0 else {}
        for name, seconds in found.items():
            beside = ratio(seconds, found[DEFAULT])
            body.append([name, str(tokens), f"{1000 * median(seconds):.1f}", str(beside)])
    about = machine.describe()
    print(f"{asked.model}, {asked.dtype}, {asked.rounds} rounds; {about['cpu']}, {about['threads']} threads\n")
    print(report.markdown(HEADER, body))


def prompt_seconds(engine: Any, prompt: Sequence[int]) -> float:
    """Until the rows of the prompt are there, but for those of a block that is not full."""
    request, unit = (
        Request(prompt, Params(max_tokens=1, ignore_eos=True)),
        engine.parts.recipes[""].traits.block,
    )
    with torch.inference_mode():
        start = time.perf_counter()
        engine.add(request)
        while request.computed < len(prompt) // unit * unit and request.left is None:
            engine.step()
        seconds = time.perf_counter() - start
        engine.cancel(request)
    return seconds


if __name__ == "__main__":
    main()
