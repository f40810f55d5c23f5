"""The text that heads learn from: what the model itself writes after corpus prompts, generated once and kept.

It lies in the cache under the model's fingerprint, so every kind of heads for a model learns from the same text, and a
run that was cut does not write it again. Small models fall into loops, which say the same few tokens for ever and make
every drafter look good: a text is cut where one begins.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from phasewise.engine.limits import Limits
from phasewise.errors import UserError
from phasewise.known.corpus import sources
from phasewise.known.shelf import caches, digest
from phasewise.llm import LLM
from phasewise.load import config_of, files_of
from phasewise.request.params import Params
from phasewise.train.device import device
from phasewise.train.tokenizer import plain
from phasewise.train.wording import Templated
from phasewise.train.written import TOGETHER, Prompts, WrittenText, collect, kept, of_file, of_mixture

LONGEST = 256  # tokens of a prompt
HELD_OUT = 96  # prompts to judge by
PERIOD, REPEATED = 16, 24  # a loop: a stretch of at most so many tokens, said again for so many tokens
LEAST = 8  # tokens of a reply that is kept
Bar = Callable[[str, int], AbstractContextManager[Callable[[int], object]]]


@dataclass(frozen=True)
class TextJob:
    """The text of one model: so many continuations of at most `new` tokens, half of them greedy, half drawn at
    temperature 1, after prompts of a file or of source and tasks."""

    model: str
    sequences: int
    new: int
    prompts: Path | None = None  # JSON lines to continue, instead of source and tasks
    seed: int = 0


def write(job: TextJob, fingerprint: str, bar: Bar) -> tuple[list[WrittenText], list[WrittenText], int]:
    """Texts to learn from, held-out greedy ones to judge by, and what pads their rows. Raises UserError for a model
    that cannot continue a prompt, and for prompts that are none."""
    config, files = config_of(job.model), files_of(job.model)
    longest = min(LONGEST, config.max_positions - job.new - 1)
    if longest < LEAST:
        raise UserError(
            f"new={job.new}: the context of {job.model}, {config.max_positions:,} tokens, has room for less"
        )
    wording = Templated(files, config.eos)
    learned, judged = _prompts(job, wording, longest)
    folder = caches() / "phasewise" / "texts" / fingerprint
    folder.mkdir(parents=True, exist_ok=True)
    name = f"{'mixture' if job.prompts is None else digest(job.prompts)[:12]}-{job.new}-{job.seed}"
    paths = (folder / f"{name}-heldout.jsonl", folder / f"{name}.jsonl")
    counts = (HELD_OUT, job.sequences)
    if any(len(kept(path)) < count for path, count in zip(paths, counts)):
        drawn = Params(max_tokens=job.new, temperature=1.0, seed=job.seed)
        llm = LLM(job.model, device=device().type, limits=Limits(max_running=TOGETHER))
        try:
            with bar(f"{job.model} writes", job.sequences) as tell:
                collect(llm, judged, paths[0], replace(drawn, temperature=0.0), HELD_OUT)
                collect(llm, learned, paths[1], drawn, job.sequences, tell)
        finally:
            llm.close()
    heldout, written = (kept(path)[:count] for path, count in zip(paths, counts))
    return unlooped(written), unlooped(heldout), wording.pad


def _prompts(job: TextJob, wording: Templated, longest: int) -> tuple[Prompts, Prompts]:
    """Prompts to learn from and held-out ones. Those of source and tasks are made when the first of them is asked for,
    since reading all of the source takes a while."""
    if job.prompts is not None:
        return of_file(wording, job.prompts, longest, False), of_file(wording, job.prompts, longest, True)

    @cache
    def made(evaluation: bool) -> Prompts:
        stream = plain(wording.tokenizer, "\n\n".join(sources(held_out=evaluation).values()))
        return of_mixture(wording, stream, longest, job.seed, evaluation)

    return lambda i: made(False)(i), lambda i: made(True)(i)


def unlooped(texts: Sequence[WrittenText]) -> list[WrittenText]:
    """The texts without their loops; what is left of fewer than `LEAST` tokens is dropped."""
    cut = [WrittenText(text.prompt, text.reply[: loop_start(text.reply)]) for text in texts]
    return [text for text in cut if len(text.reply) >= LEAST]


def loop_start(tokens: Sequence[int]) -> int:
    """The place from which a text only says again what it has said: a stretch of at most `PERIOD` tokens, repeated for
    at least `REPEATED` tokens. The first saying is kept; without a loop, the text's length."""
    start = len(tokens)
    for period in range(1, PERIOD + 1):
        run = 0
        for at in range(period, len(tokens)):
            run = run + 1 if tokens[at] == tokens[at - period] else 0
            if run == REPEATED:
                start = min(start, at + 1 - REPEATED)
                break
    return start
