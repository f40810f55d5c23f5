"""Trainers of methods' artefacts: `train/artefacts/<verb>_<name>.py` makes the artefact of methods/<verb>/<name>.py.

Each module has `train(method, job) -> Path`, which writes `job.file` and returns it; the module name is the registry.
Optional: `KEPT`, the file in `job.out` that a run goes on from, where that is no checkpoint of weights.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import torch

from phasewise.errors import UserError, near
from phasewise.load import config_of, files_of, load_model, model_path
from phasewise.model import artefacts
from phasewise.model.artefacts import Artefact
from phasewise.model.model import Model
from phasewise.train import dense
from phasewise.train.dense import DenseDecoder
from phasewise.train.device import device
from phasewise.train.mixture import Mixture, of_model

CHECKPOINT = "checkpoint.pt"


def names() -> list[str]:
    """The kinds (`verb.name`) that can be trained."""
    return sorted(module.name.replace("_", ".", 1) for module in pkgutil.iter_modules(__path__))


def frozen(model: str) -> DenseDecoder:
    """A model to train beside or through: its twin, in float32, where training computes."""
    return dense.load(model_path(model)).to(device()).requires_grad_(False)


def trainer(kind: str) -> Callable[[Any, ArtefactJob], Path]:
    """The trainer of artefacts of this kind. Raises UserError for one that nothing trains."""
    return cast(Callable[[Any, ArtefactJob], Path], _module(kind).train)


def kept(kind: str) -> str:
    """The file that a run of this kind goes on from. Raises UserError as `trainer` does."""
    return str(getattr(_module(kind), "KEPT", CHECKPOINT))


def _module(kind: str) -> ModuleType:
    if kind not in names():
        raise UserError(f"{kind!r} needs no training or is unknown. {near(kind, names())}")
    return importlib.import_module(f"{__name__}.{kind.replace('.', '_', 1)}")


@dataclass(frozen=True)
class ArtefactJob:
    """One run: the base model, where it goes, and how long."""

    model: str  # a name or directory
    out: Path
    tokens: int | None = None  # None = the recipe's own length
    seed: int = 0
    resume: bool = False

    @property
    def checkpoint(self) -> Path:
        return self.out / CHECKPOINT

    def base(self) -> tuple[Model, DenseDecoder]:
        """The base model, and its twin to train with. Raises UserError if there can be none."""
        return load_model(self.model, dtype=torch.float32), frozen(self.model)

    def mixture(self) -> Mixture:
        """Library source and tasks over the model's own tokenizer. Raises UserError if they cannot be written in it."""
        return of_model(files_of(self.model), config_of(self.model).eos, self.seed)

    def save(self, base: Model, made: Artefact, tensors: dict[str, torch.Tensor], tokens: int) -> Path:
        """Write the artefact into `out`."""
        path = self.out / made.file
        words = f"phasewise train artefact {made.setting} --model {self.model} --tokens {tokens} --seed {self.seed}"
        words += " --resume" if self.resume else ""
        artefacts.save(path, made, tensors, artefacts.fingerprint(base), words)
        return path
