"""Heads that read features, as a model: what a companion needs of one, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from phasewise.model.lowrank import Deltas
from phasewise.model.model import LayerContext, Model
from phasewise.model.rope import RopeTables
from phasewise.ops.native.stack import Stack
from phasewise.speculation.heads.block import FeatureHeads, packed
from phasewise.step.phase import Hidden


class FeatureModel(Model):
    """Loaded heads beside their target, which lends them its embeddings, its output head or both.

    Rows enter as the heads make them: mostly as pairs [T, 2 d], the embedding of a token, then the feature of the token
    before it. All attention is the engine's own, over keys and values of the heads' layers.
    """

    def __init__(self, heads: FeatureHeads, target: Model, key: str) -> None:
        """`key` names the weights: features of one key are the same features."""
        self.config, self.dtype, self.device = heads.config, target.dtype, target.device
        self.target, self.key, self.width = target, key, heads.feature_width
        self.heads = packed(heads.to(device=self.device, dtype=self.dtype))
        self.heads.requires_grad_(False)
        self.stack: Stack | None = None
        self._ropes = RopeTables(self.config.ropes, self.config.max_positions, self.dtype, self.device)
        # the layers whose output is tapped; the last one's is at hand without
        self.layers_tapped = {i - 1 for i in heads.taps} - {target.config.layers - 1}

    # ---- what the lane asks
    def features(self, hidden: Hidden, index: list[int]) -> Tensor:
        """Features [n, width] of some rows of a step of the target."""
        if not self.heads.taps:
            return self.target.norm(hidden.rows(index))
        rows, last = torch.tensor(index, device=self.device), self.target.config.layers
        states = [(hidden.x if i == last else hidden.taps[i - 1])[rows] for i in self.heads.taps]
        return self.heads.fuse(torch.cat(states, -1))

    def inputs(self, tokens: Sequence[int], features: Tensor) -> Tensor:
        """Tokens with the features [n, d] of those before them, as rows that enter the first layer."""
        return self.heads.inputs(self.embedded(tokens), features)

    def embedded(self, tokens: Sequence[int]) -> Tensor:
        """Embeddings [n, d] of tokens, the heads' own where they have some."""
        ids = torch.tensor(tokens, device=self.device)
        table = self.heads.embed_tokens
        rows: Tensor = self.target.embed(ids) if table is None else table(ids)
        return rows

    # ---- what a step asks of a model
    def embed(self, tokens: Tensor) -> Tensor:
        """Memory for rows that enter the first layer: all of them are given."""
        return torch.empty((len(tokens), self.heads.row_width), dtype=self.dtype, device=self.device)

    def layer(self, i: int, x: Tensor, ctx: LayerContext, deltas: Deltas | None = None) -> Tensor:
        """The rows of a layer for those that enter it, [T, ...] -> [T, d]."""

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            turned = ctx.rotary(0, torch.cat((q, k), 1))
            return ctx.attend(i, turned[:, : q.shape[1]], turned[:, q.shape[1] :], v)

        return self.heads.layer(i, x, attend)

    def head(self, x: Tensor) -> Tensor:
        """[R, d] -> logits [R, V] float32, over the target's vocabulary."""
        return self.heads.logits(x, self._by_target)

    def _by_target(self, x: Tensor) -> Tensor:
        """The target's own logits [R, V] of its states after the final norm."""
        logits, cap = self.target.unembed(x).float(), self.target.config.logit_softcap
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)
