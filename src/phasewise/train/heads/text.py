"""The text that heads learn from: what the model itself writes after corpus prompts, generated once and kept.

It lies in the cache under the model's fingerprint, so every kind of heads for a model learns from the same text, and a
run that was cut does not write it again. Small models fall into loops, which say the same few tokens for ever and make
every drafter look good: a text is cut where one begins.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path

from phasewise.engine.limits import Limits
from phasewise.errors import UserError
from phasewise.known.corpus import sources
from phasewise.known.shelf import caches, digest
from phasewise.llm import LLM
from phasewise.load import config_of, files_of
from phasewise.request.params import Params
from phasewise.train.device import device
from phasewise.train.mixture import Mixture
from phasewise.train.tokenizer import plain
from phasewise.train.wording import Templated
from phasewise.train.written import TOGETHER, Prompts, WrittenText, collect, of_file, of_mixture

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
    name = f"{'mixture' if job.prompts is None else digest(job.prompts)[:12]}-{job.new}-{job.seed}"
    folder.mkdir(parents=True, exist_ok=True)
    limits = Limits(max_running=TOGETHER)
    llm = LLM(job.model, device=device().type, limits=limits)
    try:
        drawn = Params(max_tokens=job.new, temperature=1.0, seed=job.seed)
        with bar(f"{job.model} writes", job.sequences + HELD_OUT) as tell:
            greedy = replace(drawn, temperature=0.0)
            heldout = collect(llm, judged, folder / f"{name}-heldout.jsonl", greedy, HELD_OUT, tell)
            written = collect(llm, learned, folder / f"{name}.jsonl", drawn, job.sequences, tell)
    finally:
        llm.close()
    return unlooped(written), unlooped(heldout), wording.pad


def _prompts(job: TextJob, wording: Templated, longest: int) -> tuple[Prompts, Prompts]:
    if job.prompts is not None:
        return of_file(wording, job.prompts, longest, False), of_file(wording, job.prompts, longest, True)
    mixture = Mixture(wording.tokenizer, list(sources(held_out=False).values()), job.seed, wording)
    held = plain(wording.tokenizer, "\n\n".join(sources(held_out=True).values()))
    learned = of_mixture(wording, mixture.stream.tolist(), longest, job.seed, False)
    return learned, of_mixture(wording, held, longest, job.seed, True)


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
