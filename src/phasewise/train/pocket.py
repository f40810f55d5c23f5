"""Train the pocket model and its draft from nothing but a Python installation: one command, seeded, resumable."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Annotated, Literal

import torch
import typer
from tokenizers import Tokenizer

from phasewise.train import dense
from phasewise.train.chat import TALK
from phasewise.train.corpus import sources
from phasewise.train.dense import Dense, Shape
from phasewise.train.mixture import CURRICULUM, Mixture
from phasewise.train.tasks import TASKS, turns
from phasewise.train.tokenizer import BEGIN, END_OF_TEXT, TURN_END, special_id, train_tokenizer, write
from phasewise.train.trainer import Recipe, start
from phasewise.train.trainer import train as run_training

Size = Literal["target", "draft"]
VOCABULARY, CONTEXT = 4096, 2048
SHAPES: dict[str, Shape] = {
    "target": Shape(VOCABULARY, 256, 8, 4, 2, 768, max_position_embeddings=CONTEXT),
    "draft": Shape(VOCABULARY, 192, 2, 3, 1, 512, max_position_embeddings=CONTEXT),
}


LENGTHS = {"target": 20_000_000, "draft": 3_000_000}
"""Default run lengths, tokens."""


def train(out: Path, size: Size = "target", tokens: int | None = None, seed: int = 0, resume: bool = False) -> Path:
    """Train one size on about `tokens` tokens (padding aside) and return the folder of the exported model.

    `out` holds checkpoint.pt, losses.csv, the tokenizer and model/. With `resume` the run continues exactly where its
    last checkpoint stood; a different `tokens` then extends or shortens the schedule.
    """
    torch.manual_seed(seed)
    out.mkdir(parents=True, exist_ok=True)
    texts = list(sources(held_out=False).values())
    tokenizer = pocket_tokenizer(texts, out)
    whole = tuple(replace(stage, stride=1) for stage in CURRICULUM)
    recipe = Recipe(tokens or LENGTHS[size], CURRICULUM if size == "target" else whole)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    run = start(Dense(SHAPES[size]).to(device), recipe)
    if resume:
        run.read(out / "checkpoint.pt")
    folder = out / "model"
    run_training(run, Mixture(tokenizer, texts, seed), recipe, out, lambda run: export(run.model, tokenizer, folder))
    return folder


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


def export(model: Dense, tokenizer: Tokenizer, folder: Path) -> None:
    """Write a complete model folder, replacing `folder` by renaming so that readers never see half of one."""
    fresh, old = folder.with_name(folder.name + ".new"), folder.with_name(folder.name + ".old")
    shutil.rmtree(fresh, ignore_errors=True)
    shutil.rmtree(old, ignore_errors=True)
    ends = [special_id(tokenizer, TURN_END), special_id(tokenizer, END_OF_TEXT)]
    dense.save(model, fresh, ends, tokenizer.token_to_id(BEGIN))
    write(tokenizer, fresh, CONTEXT)
    if folder.exists():
        os.replace(folder, old)
    os.replace(fresh, folder)
    shutil.rmtree(old, ignore_errors=True)


def main(
    out: Annotated[Path, typer.Option(help="Folder for checkpoints, the loss curve and the model.")],
    size: Annotated[str, typer.Option(help="target or draft.")] = "target",
    tokens: Annotated[int | None, typer.Option(help="Length of the run, tokens; 20M or 3M by size.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of weights and data.")] = 0,
    resume: Annotated[bool, typer.Option(help="Continue from the last checkpoint.")] = False,
) -> None:
    """Train a pocket model."""
    if size not in SHAPES:
        raise typer.BadParameter(f"{size!r}: choose one of {', '.join(SHAPES)}", param_hint="--size")
    typer.echo(train(out, "draft" if size == "draft" else "target", tokens, seed, resume))


if __name__ == "__main__":
    typer.run(main)
