"""A tokenizer, a mixture and shapes small enough for unit tests."""

from __future__ import annotations

import bisect
import heapq
import inspect
import textwrap
from functools import cache
from pathlib import Path
from random import Random

import torch
from tokenizers import Tokenizer

from phasewise.train.dense import DenseDecoder, DenseShape
from phasewise.train.mixture import Mixture, Stage
from phasewise.train.pocket import export
from phasewise.train.tasks import TASKS, turns
from phasewise.train.tokenizer import train_tokenizer
from phasewise.train.trainer import TrainingRecipe

SHAPE = DenseShape(2048, 64, 2, 4, 2, 96, head_dim=16, max_position_embeddings=512)
STAGES = (Stage(0.5, 256, 512, 0.3, 0.2, 0.2), Stage(1.0, 320, 768, 0.3, 0.2, 0.2))


def lively(shape: DenseShape, folder: Path) -> Path:
    """A checkpoint with its tokenizer; random, but every layer does something."""
    torch.manual_seed(0)
    model = DenseDecoder(shape)
    for name, parameter in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            torch.nn.init.normal_(parameter, std=0.1)
    torch.nn.init.ones_(model.norm.weight)  # type: ignore[arg-type]
    export(model, tokenizer(), folder)
    return folder


@cache
def texts() -> tuple[str, ...]:
    return tuple(inspect.getsource(module) for module in (bisect, heapq, textwrap))


@cache
def tokenizer() -> Tokenizer:
    rng = Random(0)
    samples = ["\n".join(turn.prompt for turn in turns(task, rng, 100, False)) for task in TASKS for _ in range(6)]
    return train_tokenizer([*texts(), *samples], SHAPE.vocab_size, repeats=50)


def mixture(seed: int = 0) -> Mixture:
    return Mixture(tokenizer(), texts(), seed)


def recipe(
    steps: int, checkpoint_seconds: float = 1e9, *, stages: tuple[Stage, ...] = STAGES, size: int = 614, warmup: int = 4
) -> TrainingRecipe:
    """So many steps of `size` tokens in the mean: of STAGES, half of the tokens are in steps of 512, half of 768."""
    decay = ((0.5, 1.0), (1.0, 0.01))
    return TrainingRecipe(steps * size, stages, warmup_steps=warmup, decay=decay, checkpoint_seconds=checkpoint_seconds)
