"""Weights for attend.infllm (arXiv 2506.07900): the model goes on training while its rows choose their blocks, in
low-rank weights beside all of its layers. Gradients flow through what is read; the choice itself has none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from phasewise.load import config_of
from phasewise.methods.attend._select import grouped
from phasewise.methods.attend.infllm import BlockMeans, InfLLM
from phasewise.model.config import ModelConfig
from phasewise.step.plan import Scores
from phasewise.step.reference import rivals_of, selected
from phasewise.train.artefacts import ArtefactJob
from phasewise.train.dense import TokenBlock
from phasewise.train.lowrank import LowRank
from phasewise.train.masked import tune
from phasewise.train.passes import Pass

TOKENS = 1_000_000  # padding included: a twentieth of what the pocket model itself has seen


def train(method: InfLLM, job: ArtefactJob) -> Path:
    """Tune for one way to choose; `job.out` gets checkpoint.pt, losses.csv and the artefact."""
    config = config_of(job.model)
    return tune(method.artefact(config), mask(method, config), job, TOKENS)


def mask(method: InfLLM, config: ModelConfig) -> BlockChoice:
    """The rows that each row reads when the method serves."""
    return BlockChoice(method, range(config.layers) if method.acts(config.max_positions) else range(0))


@dataclass(frozen=True)
class BlockChoice:
    """Rows of a block choose, each from those of its own text before it, which are counted from its first token."""

    method: InfLLM
    layers: range

    def on(self, blocks: Sequence[TokenBlock], delta: LowRank | None) -> Pass:
        return Pass(picks=self._picks, delta=delta)

    @torch.no_grad()
    def _picks(self, layer: int, block: int, q: Tensor, k: Tensor) -> Tensor:
        return torch.stack([self._text(*each) for each in zip(q, k, strict=True)])

    def _text(self, q: Tensor, k: Tensor) -> Tensor:
        """q [length, heads, D], k [length, kv_heads, D] -> bool [kv_heads, length, length]."""
        method, (length, heads) = self.method, k.shape[:2]
        at = torch.arange(length, device=k.device)
        seen = torch.ones(1, length, length, dtype=torch.bool, device=k.device).tril_()
        if not method.acts(length):
            return seen.expand(heads, -1, -1)
        scorer = BlockMeans(method.block)
        means = scorer.mean(k.transpose(0, 1)[:, : length // scorer.stride * scorer.stride])
        logits = grouped(q, heads) * q.shape[2] ** -0.5 @ means.float().mT[:, None]
        votes = scorer.pooled(logits, None, at, length - 1)
        rows = rivals_of(method.keys, at, at[None], seen, length - 1)
        return selected(method.keys, rows, Scores(votes))
