"""EAGLE's heads and MTP modules as they are trained: unrolled over their own outputs, at all positions of a text at
once.

This is the training-time test of EAGLE-3 (arXiv 2503.01840, section 3.2). The first step reads true features. Step j
reads at position t the output of step j - 1 at t, and the token t + 1 + j; it sees the pairs of the first step up to t
and, of each later step, the one at t, as a guess does in a draft. Heads that were trained on the first step alone have
never met their own outputs, and their second guess falls.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from phasewise.model.rope import RopeTables
from phasewise.speculation.heads.block import FeatureHeads
from phasewise.speculation.heads.eagle import Eagle3
from phasewise.speculation.heads.fspad import Fspad
from phasewise.speculation.heads.layouts import settings_of, tensors_of, untrained
from phasewise.speculation.heads.mtp import MTP
from phasewise.train.dense import TokenBlock
from phasewise.train.heads.target import FrozenTarget, SeenBlock

BEGIN = 0.3  # of the model's logits: at full scale, what is said again is surely wrong


@dataclass(frozen=True)
class FeatureKind:
    """Heads of a kind, `eagle1`, `eagle3` or `mtp`: a block of the model's width with one key head and an MLP half
    as wide, so that those for a small model are small."""

    kind: str
    every: int = 1  # one position of so many is learned in a step

    @property
    def own_output(self) -> bool:
        return self.kind == "eagle3"

    def taps(self, module: FeatureHeads) -> tuple[int, ...]:
        return tuple(i - 1 for i in module.taps)

    def build(self, target: FrozenTarget, depth: int, vocabulary: Tensor | None = None) -> FeatureHeads:
        made = untrained(self.kind, target.model, narrow=True, draft_vocab=0 if vocabulary is None else len(vocabulary))
        made.steps = depth
        if made.d2t is not None and vocabulary is not None:
            made.d2t.copy_(vocabulary - torch.arange(len(vocabulary)))
        begin(made, target)
        return made.to(target.output.device)

    def begin(self, module: FeatureHeads, target: FrozenTarget, texts: TokenBlock) -> None:
        """Does nothing: no initial weight hangs on the text."""

    def vocabulary(self, module: FeatureHeads) -> Tensor | None:
        return None if module.d2t is None else module.draft_ids()

    def guesses(self, module: FeatureHeads, target: FrozenTarget, seen: SeenBlock) -> Iterator[Tensor]:
        """Logits of each step in turn, [n, V], where it is learned."""
        ids = seen.block.ids
        feature = module.fuse(torch.cat([seen.taps[tap] for tap in self.taps(module)], -1)) if module.taps else seen.h
        unrolled = UnrolledAttention(module, seen.block.positions)
        for step in range(module.steps):
            later = F.pad(ids[:, 1 + step :], (0, 1 + step))  # what is said behind the end is never learned
            output = module(target.embed(later), feature, unrolled.attend)
            yield module.logits(output[:, : ids.shape[1] - 1 - step][seen.wanted(step)], target.unembed)
            feature = module.passed_on(output)

    def config(self, module: FeatureHeads, target: FrozenTarget) -> dict[str, Any]:
        return settings_of(module, target.model, module.steps)

    def tensors(self, module: FeatureHeads) -> dict[str, Tensor]:
        return tensors_of(module)


@torch.no_grad()
def begin(heads: FeatureHeads, target: FrozenTarget) -> None:
    """Initial weights with which heads say again, less surely, what the model says: the feature passes through."""
    block, feature, fusing = heads.block, torch.eye(target.hidden), "fc"
    for closing in (block.self_attn.o_proj, block.mlp.down_proj):
        closing.weight.zero_()
    if isinstance(heads, MTP):
        # Behind a norm the feature is of mean square 1; the model's own has that of its norm's weights.
        joined = heads.block.input_proj
        joined.weight.normal_(std=0.005)[:, -target.hidden :] += feature
        heads.block.final_layernorm.weight.fill_(BEGIN * float(target.model.norm.weight.float().square().mean().sqrt()))
        return
    if isinstance(heads, Fspad):
        heads.fc.mlp.down_proj.weight.zero_()
        fusing = "fc.fc"
    heads.get_parameter(f"{fusing}.weight").normal_(std=0.005)[:, -target.hidden :] += BEGIN * feature
    if isinstance(heads, Eagle3):
        known = target.output if heads.d2t is None else target.output[heads.draft_ids()]
        heads.get_parameter("lm_head.weight").copy_(known)
        heads.norm.weight.copy_(BEGIN * target.model.norm.weight)
    else:
        heads.get_parameter(f"{fusing}.bias").zero_()


class UnrolledAttention:
    """The attention of one step after the other over the same rows [rows, length], which begin at `positions`."""

    def __init__(self, heads: FeatureHeads, positions: Tensor) -> None:
        self.scale, self.positions = heads.config.attention[0].scale, positions
        self.ropes = RopeTables(heads.config.ropes, heads.config.max_positions, torch.float32, positions.device)
        self.keys: list[Tensor] = []  # [rows, Hq, length, D] of each step so far
        self.values: list[Tensor] = []

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [rows, length, Hq, D], k and v [rows, length, H, D] of the next step -> [rows, length, Hq, D]."""
        heads, length = q.shape[2], q.shape[1]
        q, k = self._turned(torch.cat((q, k), 2)).split_with_sizes((heads, k.shape[2]), 2)
        q, k, v = (each.repeat_interleave(heads // each.shape[2], 2).transpose(1, 2) for each in (q, k, v))
        self.keys.append(k)
        self.values.append(v)
        later = torch.ones(length, length, dtype=torch.bool, device=q.device).triu_(1)
        scores = (q @ self.keys[0].mT).masked_fill(later, float("-inf"))
        own = [(q * key).sum(-1, keepdim=True) for key in self.keys[1:]]  # of each later step the row's own pair
        weights = (torch.cat((scores, *own), -1) * self.scale).softmax(-1)
        read = weights[..., :length] @ self.values[0]
        for step, value in enumerate(self.values[1:]):
            read = read + weights[..., length + step, None] * value
        return read.transpose(1, 2)

    def _turned(self, x: Tensor) -> Tensor:
        """x [rows, length, n, D] of the next step, rotated: each step's rows stand one further on."""
        positions = (self.positions + len(self.keys)).flatten()
        return self.ropes(positions)(0, x.flatten(0, 1)).view(x.shape)
