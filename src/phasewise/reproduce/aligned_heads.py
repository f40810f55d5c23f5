"""EAGLE's heads for the pocket model, trained as FSPAD's are: the same texts, losses, noise, steps and rate."""

from __future__ import annotations

import shutil
from contextlib import nullcontext
from pathlib import Path

from phasewise.load import model_path
from phasewise.model.artefacts import FOLDER
from phasewise.train.heads.aligned import AlignedKind
from phasewise.train.heads.run import HeadsJob, train

EAGLE = "eagle1"  # their kind, and their folder beside the model
INNER = 224  # numbers of EAGLE's MLP: then its heads have as many as FSPAD's, whose two MLPs have 96
LEARNED, QUICKLY = (300_000, 2000), (1500, 64)  # tokens and texts: of the shipped heads, and of a quick run


def job(kind: str, out: Path, learned: tuple[int, int]) -> HeadsJob:
    """The job of pocket's shipped FSPAD heads, of this kind, with so many tokens and texts."""
    tokens, texts = learned
    return HeadsJob(kind, "pocket", out, tokens, depth=4, rate=2e-3, sequences=texts, step=512, dtype="bfloat16")


def eagle_beside_pocket(learned: tuple[int, int], target: Path) -> None:
    """The pocket model as it is, with such heads of EAGLE's beside it."""
    out = target / FOLDER / "heads" / EAGLE
    train(job(EAGLE, out, learned), lambda what, total: nullcontext(lambda done: None), AlignedKind(EAGLE, inner=INNER))
    shutil.copytree(model_path("pocket"), target, ignore=shutil.ignore_patterns(FOLDER), dirs_exist_ok=True)
