"""Loss of a text far beyond a model's context, with a window of its last rows, with its first rows kept and without.

    python scripts/long_stream.py [--model smollm2] [--times 20] [--window 1020] [--sinks 4] [--ends 4] [--stretch 64]

Stretches of those parts of Python's library that the pocket model was not trained on are written by force after one
context of the text before them, and after `--times` of it (StreamingLLM, arXiv 2309.17453: flat with a few first rows,
which draw the attention that has no other place; broken where they are gone). Prints a Markdown table: nats per token,
the mean over the ends.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence

import torch

from phasewise.bench import machine, report
from phasewise.bench.drive import Bench
from phasewise.bench.forced import Forced, write
from phasewise.cli.progress import counting
from phasewise.engine.limits import Limits
from phasewise.known.corpus import sources
from phasewise.load import files_of
from phasewise.model.tokenizer import Tokenizer

HEADER = ["setting", "contexts", "text, tokens", "nats per token"]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--times", type=int, default=20, help="contexts of the model that the long text has")
    parser.add_argument("--window", type=int, default=1020)
    parser.add_argument("--sinks", type=int, default=4)
    parser.add_argument("--ends", type=int, default=4, help="places of the text that are written")
    parser.add_argument("--stretch", type=int, default=64, help="tokens that are written at each")
    asked = parser.parse_args(argv)
    bench = Bench.load(asked.model, asked.dtype)
    context = bench.model.config.max_positions
    before, own = encoded(asked.model, held_out=False, least=asked.times * context), encoded(asked.model, held_out=True)
    ids, first = before + own, len(before)
    ends = [first + (i + 1) * len(own) // asked.ends for i in range(asked.ends)]
    body, rows = [], asked.sinks + asked.window
    settings = [
        (f"evict=streaming:sinks={sinks},window={rows - sinks}", times)
        for sinks in (asked.sinks, 0)
        for times in (1, asked.times)
    ]
    with counting("stretches", len(settings) * len(ends)) as tell, torch.inference_mode():
        for setting, times in settings:
            nats = []
            for end in ends:
                forced, text = Forced(), ids[end - times * context : end]
                verbs = {"evict": setting.partition("=")[2]}
                engine = bench.engine(verbs, Limits(prefix_cache=False), sample=forced)
                (found,) = write(engine, forced, [(text, len(text) - asked.stretch)])
                nats.append(statistics.fmean(found.nats))
                tell((len(body)) * len(ends) + len(nats))
            body.append([setting, str(times), f"{times * context:,}", f"{statistics.fmean(nats):.3f}"])
    about = machine.describe()
    print(f"{asked.model}, {asked.dtype}, {asked.stretch} tokens at {asked.ends} ends; {about['cpu']}\n")
    print(report.markdown(HEADER, body))


def encoded(model: str, held_out: bool, least: int | None = None) -> list[int]:
    """Python's library in a model's tokens, or the last of it that has so many."""
    tokenizer, found = Tokenizer.load(files_of(model).path), list[int]()
    for text in reversed(sources(held_out).values()):
        if least is not None and len(found) >= least:
            break
        found = [*tokenizer.encode(text, add_special=False), *found]
    return found


if __name__ == "__main__":
    main()
