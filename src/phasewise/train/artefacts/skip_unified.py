"""Tuning for skip.unified (arXiv 2404.06954, section on training): full-depth prompts, shallow replies, and the loss of
the replies alone. The base stays frozen; low-rank weights beside the layers that run are learned."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.optim import AdamW

from phasewise.errors import UserError
from phasewise.methods.skip.unified import Unified, kept
from phasewise.train.artefacts import ArtefactJob
from phasewise.train.dense import DenseDecoder, TokenBlock, losses
from phasewise.train.device import halved
from phasewise.train.exchanges import Exchanges, PromptReplyBatch
from phasewise.train.lowrank import LowRank
from phasewise.train.mixture import Stage
from phasewise.train.passes import Pass
from phasewise.train.trainer import StepLoss, TrainingRecipe, TrainingRun, fit, weighed

TOKENS = 3_000_000  # prompts and padding included
RATE = 3e-3
STAGES = (
    Stage(0.7, 512, 4096, code=0.4, long=0.15, copies=0.3),
    Stage(1.0, 1024, 6144, code=0.35, long=0.25, copies=0.3),
)
DECAY = ((0.4, 1.0), (1.0, 0.01))


def train(method: Unified, job: ArtefactJob) -> Path:
    """Tune for one speed-up; `job.out` gets checkpoint.pt, losses.csv and the artefact."""
    base, twin = job.base()
    made = method.artefact(base.config)
    layers = kept(base.config.layers, method.speedup)
    if len(layers) == base.config.layers:
        raise UserError(f"unified: speedup={method.speedup} needs no training: choose one above 1")
    torch.manual_seed(job.seed)
    tokens = job.tokens or TOKENS
    run = start(LowRank(made.shapes))
    if job.resume:
        run.read(job.checkpoint)

    def save(run: TrainingRun[LowRank]) -> None:
        job.save(base, made, run.model.tensors(), tokens)

    def loss(stage: Stage, batch: tuple[list[PromptReplyBatch], list[PromptReplyBatch]]) -> StepLoss:
        return reply_loss(twin, run.model, layers, batch)

    recipe = TrainingRecipe(tokens, STAGES, decay=DECAY)
    fit(run, loss, Exchanges(job.mixture()), recipe, job.out, save)
    return job.save(base, made, run.model.tensors(), tokens)


def start(delta: LowRank) -> TrainingRun[LowRank]:
    """A fresh run; the frozen base is no part of it."""
    return TrainingRun(delta, [AdamW(delta.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.0)])


def reply_loss(
    twin: DenseDecoder, delta: LowRank, layers: Sequence[int],
    batch: tuple[list[PromptReplyBatch], list[PromptReplyBatch]],
) -> StepLoss:  # fmt: skip
    """Cross-entropy of replies at `layers`, over the keys and values that their prompts left at full depth."""
    source, tasks = batch
    both = [*source, *tasks]
    with halved(twin.embed_tokens.weight.device):
        how = replying(twin, delta, layers, both)
        each = losses(twin, [part.replies for part in both], how)
    code, task = torch.cat(each[: len(source)]), torch.cat(each[len(source) :])
    return weighed(code, task, sum(part.tokens for part in both))


def replying(
    twin: DenseDecoder, delta: LowRank | None, layers: Sequence[int], exchanges: Sequence[PromptReplyBatch]
) -> Pass:
    """The pass in which the replies run: what the engine does with the rows of its decode phase."""
    prompts: list[TokenBlock] = [part.prompts for part in exchanges]
    real: list[Tensor] = [part.real for part in exchanges]
    gates = [layer in layers for layer in range(len(twin.layers))]
    return Pass(past=twin.prefill(prompts, real), gates=gates, delta=delta)
