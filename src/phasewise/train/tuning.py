"""A pocket model is taught one thing more: low-rank weights beside all its linear layers are learned, its own stay as
they are, and what comes out is a plain model with both added (`model/tuned.py`)."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import torch
from safetensors.torch import save_file
from torch.optim import AdamW

from phasewise.errors import UserError
from phasewise.model import tuned
from phasewise.model.artefacts import fingerprint
from phasewise.model.directory import Directory
from phasewise.model.lowrank import shapes
from phasewise.model.raw import read_json
from phasewise.train.artefacts import ArtefactJob
from phasewise.train.dense import DenseDecoder
from phasewise.train.device import Data
from phasewise.train.folders import replaced
from phasewise.train.lowrank import LowRank
from phasewise.train.mixture import Mixture
from phasewise.train.pocket import draw_if_possible
from phasewise.train.trainer import StepLoss, TrainingRecipe, TrainingRun, fit

RANK, RATE = 16, 3e-3
B = TypeVar("B")


@dataclass(frozen=True)
class Lesson(Generic[B]):
    """What is taught. `name` is that of the command, `loss` is of the frozen model and the low-rank weights over a
    batch, and `template` is the chat template of what comes out; None: the base's own."""

    name: str
    loss: Callable[[DenseDecoder, LowRank, B], StepLoss]
    data: Callable[[Mixture], Data[B]]
    recipe: TrainingRecipe
    template: str | None = None


def start(delta: LowRank) -> TrainingRun[LowRank]:
    """A fresh run; the frozen base is no part of it."""
    return TrainingRun(delta, [AdamW(delta.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.0)])


def teach(job: ArtefactJob, lesson: Lesson[B]) -> Path:
    """Teach `job.model`; `job.out` gets checkpoint.pt, losses.csv, curve.png, the low-rank weights and model/.

    Returns the folder of the model, a plain checkpoint. Raises UserError for a model that this is not for, and if a run
    cannot be resumed so.
    """
    base, twin = job.base()
    files = base.files
    if not isinstance(files, Directory):
        raise UserError(f"{files.path} is not a directory with a model of its own: teach pocket, or one like it")
    torch.manual_seed(job.seed)
    run = start(LowRank(shapes(base.config, range(base.config.layers), RANK)))
    run.settings = {"model": job.model, "seed": job.seed}
    if job.resume:
        run.read(job.checkpoint)
    words = f"phasewise train {lesson.name} --model {job.model} --tokens {lesson.recipe.tokens} --seed {job.seed}"
    about = {"base": fingerprint(base), "over": files.path.name, "command": words}

    def save(run: TrainingRun[LowRank]) -> None:
        tuned.save(job.out / tuned.FILE, run.model.tensors(), about)

    data = lesson.data(job.mixture())
    fit(run, lambda _, batch: lesson.loss(twin, run.model, batch), data, lesson.recipe, job.out, save)
    save(run)
    draw_if_possible(job.out)
    return export(files, job.out / tuned.FILE, job.out / "model", lesson.template)


def export(base: Directory, delta: Path, folder: Path, template: str | None) -> Path:
    """A complete model folder, in the place of what is there: the base with what was learned added, and with this chat
    template; None: the base's own."""
    merged = tuned.Merged(base, delta)
    with replaced(folder) as fresh:
        fresh.mkdir(parents=True)
        tensors = {name: merged.read(name).contiguous() for name in merged.where}
        save_file(tensors, fresh / "model.safetensors", {"format": "pt"})
        for name in ("config.json", "generation_config.json", "tokenizer.json"):
            shutil.copyfile(base.path / name, fresh / name)
        config = read_json(base.path / "tokenizer_config.json")
        config |= {} if template is None else {"chat_template": template}
        (fresh / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return folder
