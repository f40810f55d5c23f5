"""Weights for evict.longgen (arXiv 2410.01485): the model goes on training with the mask on, in low-rank weights beside
all of its layers, the full ones too, for they have to find what the others no longer see."""

from __future__ import annotations

from pathlib import Path

from phasewise.load import config_of
from phasewise.methods.evict.longgen import LongGen
from phasewise.model.config import ModelConfig
from phasewise.train.artefacts import ArtefactJob
from phasewise.train.masked import Mask, tune


def train(method: LongGen, job: ArtefactJob) -> Path:
    """Tune for one mask; `job.out` gets checkpoint.pt, losses.csv and the artefact."""
    config = config_of(job.model)
    return tune(method.artefact(config), mask(method, config), job)


def mask(method: LongGen, config: ModelConfig) -> Mask:
    """The rows that each row sees when the method serves."""
    return Mask(method.narrow(config), method.seen.seen)
