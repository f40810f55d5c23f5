"""Train the pocket model and its draft from nothing but a Python installation: one command, seeded, resumable."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Literal

import torch
from tokenizers import Tokenizer

from phasewise.known.corpus import beside, sources
from phasewise.train import curve, dense
from phasewise.train.chat import TALK
from phasewise.train.dense import DenseDecoder, DenseShape
from phasewise.train.folders import replaced
from phasewise.train.mixture import BATCH, CURRICULUM, Mixture, batched
from phasewise.train.tasks import TASKS, turns
from phasewise.train.tokenizer import BEGIN, END_OF_TEXT, TURN_END, special_id, train_tokenizer, write
from phasewise.train.trainer import TrainingRecipe, TrainingRun, start
from phasewise.train.trainer import train as run_training
from phasewise.train.validation import Validation

Size = Literal["target", "draft"]
VOCABULARY, CONTEXT = 4096, 2048
SHAPES: dict[str, DenseShape] = {
    "target": DenseShape(VOCABULARY, 256, 8, 4, 2, 768, max_position_embeddings=CONTEXT),
    "draft": DenseShape(VOCABULARY, 192, 2, 3, 1, 512, max_position_embeddings=CONTEXT),
}


LENGTHS = {"target": 60_000_000, "draft": 3_000_000}
"""Default run lengths, tokens."""


@dataclass(frozen=True)
class PocketJob:
    """One run. `out` gets checkpoint.pt, losses.csv, validation.csv, curve.png, the tokenizer and model/."""

    out: Path
    size: Size = "target"
    tokens: int | None = None  # about so many, padding aside; None = the size's own length
    seed: int = 0
    resume: bool = False  # exactly from where the last checkpoint stood; other `tokens` stretch the schedule
    batch: int = BATCH  # tokens of the largest steps; the rates stay
    minutes: float = 15.0  # between two looks at examples that are not trained on


def train(job: PocketJob) -> Path:
    """Train one size and return the folder of the exported model. Raises UserError if a run cannot be resumed so."""
    torch.manual_seed(job.seed)
    job.out.mkdir(parents=True, exist_ok=True)
    texts = list(sources(held_out=False).values())
    tokenizer = pocket_tokenizer(texts, job.out)
    recipe = TrainingRecipe(job.tokens or LENGTHS[job.size], batched(CURRICULUM, job.batch))
    run = start(DenseDecoder(SHAPES[job.size]), recipe)
    run.settings = {"size": job.size, "seed": job.seed, "batch": job.batch}
    if job.resume:
        run.read(job.out / "checkpoint.pt")
    else:
        (job.out / "validation.csv").unlink(missing_ok=True)
    folder, mixture = job.out / "model", Mixture(tokenizer, [*texts, *texts, *beside().values()], job.seed)
    validation = Validation(mixture, job.out, job.minutes)

    def saved(run: TrainingRun[DenseDecoder]) -> None:
        export(run.model, tokenizer, folder)
        validation.when_due(run)

    run_training(run, mixture, recipe, job.out, saved)
    validation.look(run)
    draw_if_possible(job.out)
    return folder


def draw_if_possible(out: Path) -> None:
    """curve.png from losses.csv, where matplotlib is installed."""
    if importlib.util.find_spec("matplotlib") is not None:
        curve.draw(out / "curve.png", [out / "losses.csv"])


def pocket_tokenizer(texts: Sequence[str], out: Path) -> Tokenizer:
    """The tokenizer stored in `out`, or one trained now on the library and a fixed sample of the tasks."""
    path = out / "tokenizer.json"
    if not path.exists():
        rng = Random(0)
        samples = [
            "\n".join(f"{turn.prompt}\n{turn.answer}" for turn in turns(task, rng, 200, evaluation=False))
            for _ in range(3000)
            for task in TASKS
        ]
        talk = ["\n".join((*questions, answer)) for questions, answer in TALK] * 50
        write(train_tokenizer([*texts, *samples, *talk], VOCABULARY), out, CONTEXT)
    return Tokenizer.from_file(str(path))


def export(model: DenseDecoder, tokenizer: Tokenizer, folder: Path) -> None:
    """Write a complete model folder in the place of what is there."""
    ends = [special_id(tokenizer, TURN_END), special_id(tokenizer, END_OF_TEXT)]
    with replaced(folder) as fresh:
        dense.save(model, fresh, ends, tokenizer.token_to_id(BEGIN))
        write(tokenizer, fresh, CONTEXT)
