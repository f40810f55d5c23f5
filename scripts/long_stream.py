"""Loss of a text far beyond a model's context, with a window of its last rows, with its first rows kept and without;
and of dense attention within that context and beyond it.

    python scripts/long_stream.py [--model smollm2] [--times 20] [--window 1020] [--sinks 4] [--ends 4] [--stretch 64]
                                  [--dense 2]

Stretches of those parts of Python's library that the pocket model was not trained on are written by force after one
context of the text before them, and after `--times` of it (StreamingLLM, arXiv 2309.17453: flat with a few first rows,
which draw the attention that has no other place; broken where they are gone). Dense attention, which the engine refuses
beyond a model's context, reads `--dense` of them where it is told that they are one; 0 leaves it out. Prints a Markdown
table: nats per token, the mean over the ends. Then, token by token, whether sinks are better than none and dense
attention is worse beyond the context: exits with 1 if that is not so.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from phasewise.bench import machine, report
from phasewise.bench.drive import Bench
from phasewise.bench.forced import Forced, reaching, write
from phasewise.bench.stats import means
from phasewise.cli.progress import counting
from phasewise.engine.limits import Limits
from phasewise.known.corpus import sources
from phasewise.load import files_of
from phasewise.model.tokenizer import Tokenizer

CLEAR = 0.02  # nats per token; a model that loses less has not lost its hold
HEADER = ["setting", "contexts", "text, tokens", "nats per token"]


@dataclass(frozen=True)
class Row:
    """What is written: behind so many contexts of text, by an engine with this evict method (none: dense)."""

    evict: str
    times: int

    @property
    def setting(self) -> str:
        return f"evict={self.evict}" if self.evict else "dense"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(";")[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--times", type=int, default=20, help="contexts of the model that the long text has")
    parser.add_argument("--window", type=int, default=1020)
    parser.add_argument("--sinks", type=int, default=4)
    parser.add_argument("--ends", type=int, default=4, help="places of the text that are written")
    parser.add_argument("--stretch", type=int, default=64, help="tokens that are written at each")
    parser.add_argument("--dense", type=int, default=2, help="contexts of text that dense attention reads; 0: none")
    asked = parser.parse_args(argv)
    bench = Bench.load(asked.model, asked.dtype)
    context, most = bench.model.config.max_positions, max(asked.times, asked.dense)
    before, own = encoded(asked.model, held_out=False, least=most * context), encoded(asked.model, held_out=True)
    ids, first = before + own, len(before)
    ends = [first + (i + 1) * len(own) // asked.ends for i in range(asked.ends)]
    rows = asked.sinks + asked.window
    sinks, none = (f"streaming:sinks={kept},window={rows - kept}" for kept in (asked.sinks, 0))
    tried = [Row(evict, times) for evict in (sinks, none) for times in (1, asked.times)]
    tried += [Row("", times) for times in (1, asked.dense) if asked.dense]
    found: dict[Row, list[float]] = {}
    with counting("stretches", len(tried) * len(ends)) as tell, torch.inference_mode():
        for row in tried:
            found[row] = []
            for end in ends:
                found[row] += written(bench, row, ids[end - row.times * context : end], asked.stretch)
                tell(sum(map(len, found.values())) // asked.stretch)
    body = [[row.setting, str(row.times), f"{row.times * context:,}", f"{statistics.fmean(nats):.3f}"]
            for row, nats in found.items()]  # fmt: skip
    about = machine.describe()
    print(f"{asked.model}, {asked.dtype}, {asked.stretch} tokens at {asked.ends} ends; {about['cpu']}\n")
    print(report.markdown(HEADER, body))
    pairs = {f"sinks better than none after {asked.times} contexts": (found[tried[1]], found[tried[3]])}
    if asked.dense:
        pairs[f"dense attention worse after {asked.dense} contexts than after one"] = found[tried[4]], found[tried[5]]
    said, holds = verdict(pairs)
    print("\n" + "\n".join(said))
    return 0 if holds else 1


def written(bench: Bench, row: Row, text: list[int], stretch: int) -> list[float]:
    """Nats of each of the last tokens of `text`."""
    forced = Forced()
    verbs = {"evict": row.evict} if row.evict else {}
    able = bench if row.evict else Bench(reaching(bench.model, len(text)))
    engine = able.engine(verbs, Limits(prefix_cache=False), sample=forced)
    (found,) = write(engine, forced, [(text, len(text) - stretch)])
    return found.nats


def verdict(pairs: Mapping[str, tuple[Sequence[float], Sequence[float]]]) -> tuple[list[str], bool]:
    """A line per claim, each the nats of the same tokens where they should be fewer and where more; whether all hold:
    the 95 % interval of the mean difference lies above `CLEAR`."""
    said, holds = [], True
    for claim, (fewer, more) in pairs.items():
        lead = means(more, fewer)
        said.append(f"{claim}: {'yes' if lead.low > CLEAR else 'no'} ({lead.text(False)} per token)")
        holds = holds and lead.low > CLEAR
    return said, holds


def encoded(model: str, held_out: bool, least: int | None = None) -> list[int]:
    """Python's library in a model's tokens, or the last of it that has so many."""
    tokenizer, found = Tokenizer.load(files_of(model).path), list[int]()
    for text in reversed(sources(held_out).values()):
        if least is not None and len(found) >= least:
            break
        found = [*tokenizer.encode(text, add_special=False), *found]
    return found


if __name__ == "__main__":
    sys.exit(main())
