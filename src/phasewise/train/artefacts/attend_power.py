"""Weights for attend.power (arXiv 2503.03588): the model goes on training with the mask on, in low-rank weights beside
all of its layers, so that what lies between the blocks that a row sees is handed on by those it does see."""

from __future__ import annotations

from pathlib import Path

from phasewise.load import config_of
from phasewise.methods.attend.power import Power
from phasewise.model.config import ModelConfig
from phasewise.train.artefacts import ArtefactJob
from phasewise.train.masked import Mask, tune


def train(method: Power, job: ArtefactJob) -> Path:
    """Tune for one mask; `job.out` gets checkpoint.pt, losses.csv and the artefact."""
    config = config_of(job.model)
    return tune(method.artefact(config), mask(method, config), job)


def mask(method: Power, config: ModelConfig) -> Mask:
    """The rows that each row sees when the method serves."""
    return Mask(range(config.layers) if method.acts(config) else (), method.seen)
