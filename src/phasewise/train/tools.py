"""Teach a pocket model to call a calculator: low-rank weights on all its linear layers, its own weights frozen.

What the assistant says in conversations with tools is learned by cross-entropy. What the model does without tools is
kept by the Kullback-Leibler divergence from what it did before, over its own training data.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from phasewise.train.artefacts import ArtefactJob
from phasewise.train.dense import DenseDecoder, TokenBlock, losses
from phasewise.train.device import halved
from phasewise.train.lowrank import LowRank
from phasewise.train.mixture import Stage
from phasewise.train.passes import Pass
from phasewise.train.tooluse import TEMPLATE, ToolBatch, ToolConversations
from phasewise.train.trainer import StepLoss, TrainingRecipe
from phasewise.train.tuning import Lesson, teach

TOKENS = 1_000_000  # padding included
STAGES = (
    Stage(0.35, 320, 3072, code=0.06, long=0.0, copies=0.25, short=96),  # easy sums alone
    Stage(1.0, 320, 2048, code=0.06, long=0.0, copies=0.25, short=96),
)
DECAY = ((0.5, 1.0), (1.0, 0.01))
KEEP = 2.0  # weight of the divergence from the base, beside the cross-entropy


def tool_loss(twin: DenseDecoder, delta: LowRank, batch: ToolBatch) -> StepLoss:
    """Cross-entropy of what is said with tools, and the divergence from the base where there are none."""
    tuned = Pass(delta=delta)
    with halved(twin.embed_tokens.weight.device):
        said = torch.cat(losses(twin, batch.learned, tuned))
        kept = divergence(twin, batch.kept, tuned)
    total = said.mean() + KEEP * kept.mean()
    means = {"call": float(said.detach().mean()), "kept": float(kept.detach().mean())}
    return StepLoss(total, means, sum(block.ids.numel() for block in (*batch.learned, *batch.kept)))


def divergence(twin: DenseDecoder, blocks: list[TokenBlock], tuned: Pass) -> Tensor:
    """KL(base || tuned) in nats at every learned token, float32 [learned]."""
    wanted = torch.cat([block.targets.flatten() for block in blocks]) >= 0
    with torch.no_grad():
        base = _logits(twin, blocks, Pass(), wanted).log_softmax(-1)
    own = _logits(twin, blocks, tuned, wanted).log_softmax(-1)
    return F.kl_div(own, base, reduction="none", log_target=True).sum(-1)


def _logits(twin: DenseDecoder, blocks: list[TokenBlock], how: Pass, wanted: Tensor) -> Tensor:
    return F.linear(twin.hidden(blocks, how)[wanted], twin.embed_tokens.weight).float()


def train(job: ArtefactJob) -> Path:
    """Teach `job.model` (`tuning.teach`), with a chat template that shows tools."""
    recipe = TrainingRecipe(job.tokens or TOKENS, STAGES, decay=DECAY)
    return teach(job, Lesson("tools", tool_loss, ToolConversations, recipe, TEMPLATE))
