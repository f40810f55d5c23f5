"""Falcon's heads for the pocket model that were trained without answers to glance at: the same texts, losses, noise,
steps and rate as those that ship."""

from __future__ import annotations

import shutil
from contextlib import nullcontext
from pathlib import Path

from phasewise.load import model_path
from phasewise.model.artefacts import FOLDER
from phasewise.reproduce.aligned_heads import job
from phasewise.train.heads.falcon import FalconKind
from phasewise.train.heads.run import train

FALCON = "falcon"  # their kind, and their folder beside the model


def plain_beside_pocket(learned: tuple[int, int], target: Path) -> None:
    """The pocket model as it is, with such heads beside it, of so many tokens and texts."""
    out = target / FOLDER / "heads" / FALCON
    train(job(FALCON, out, learned), lambda what, total: nullcontext(lambda done: None), FalconKind(glance=0.0))
    shutil.copytree(model_path("pocket"), target, ignore=shutil.ignore_patterns(FOLDER), dirs_exist_ok=True)
