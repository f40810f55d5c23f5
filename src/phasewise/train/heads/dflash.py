"""DFlash's heads as they are trained: a block of masks behind every token of a text at once (arXiv 2602.06036).

The block of position t holds the token t + 1 and masks. It reads the features up to t and itself, as a draft does, and
no other block. So one pass over a text learns every draft that could be made of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from phasewise.model.rope import RopeTables
from phasewise.speculation.heads.block import AttendRows, FeatureHeads
from phasewise.speculation.heads.dflash import DFlashHeads
from phasewise.speculation.heads.layouts import untrained
from phasewise.train.heads.feature import FeatureKind
from phasewise.train.heads.target import FrozenTarget, SeenBlock

FAINT = 0.05  # of the model's logits: those of an average of states are large, and surely wrong


@dataclass(frozen=True)
class DFlashKind(FeatureKind):
    """Two layers with MLPs half as wide as the model; embeddings and output matrix are its own. At first a mask gets
    what the top tap's states along the text are on average."""

    kind: str = "dflash"

    def build(self, target: FrozenTarget, depth: int, vocabulary: Tensor | None = None) -> FeatureHeads:
        made = untrained(self.kind, target.model, narrow=True, guesses=depth)
        made.steps = depth
        begin(made, target)
        return made.to(target.output.device)

    def guesses(self, module: FeatureHeads, target: FrozenTarget, seen: SeenBlock) -> Iterator[Tensor]:
        assert isinstance(module, DFlashHeads)
        ids = seen.block.ids[:, 1:]
        feature = module.fuse(torch.cat([seen.taps[tap] for tap in self.taps(module)], -1))
        masks = torch.full((*ids.shape, module.parallel), module.mask, device=ids.device)
        x = target.embed(torch.cat((ids[..., None], masks), -1))  # [rows, length - 1, block, d]
        blocks = BlocksOverText(module, seen.block.positions, feature)
        for i in range(module.config.layers):
            x = module.layer(i, x, blocks.attend(i))
        for head in range(module.parallel):
            read = x[:, : ids.shape[1] - head, 1 + head]
            yield module.logits(read[seen.wanted(head)], target.unembed)


@torch.no_grad()
def begin(heads: FeatureHeads, target: FrozenTarget) -> None:
    """Initial weights with which features pass through attention as they are, and nothing else is added."""
    assert isinstance(heads, DFlashHeads)
    heads.fc.weight.normal_(std=0.005)[:, -target.hidden :] += torch.eye(target.hidden)
    for i, block in enumerate(heads.layers):
        block.get_parameter("mlp.down_proj.weight").zero_()
        nn.init.eye_(block.get_parameter("self_attn.v_proj.weight"))
        through = block.get_parameter("self_attn.o_proj.weight")
        through.zero_() if i else nn.init.eye_(through)
    heads.norm.weight.copy_(FAINT * target.model.norm.weight)


class BlocksOverText:
    """The attention of a text's blocks [rows, length - 1, block], over features [rows, length, d] and themselves."""

    def __init__(self, heads: DFlashHeads, positions: Tensor, feature: Tensor) -> None:
        """`positions` int64 [rows, length]: of the features' tokens."""
        self.heads, self.feature, self.positions = heads, feature, positions
        self.scale = heads.config.attention[0].scale
        self.ropes = RopeTables(heads.config.ropes, heads.config.max_positions, torch.float32, positions.device)
        length, device = positions.shape[1], positions.device
        self.later = torch.ones(length - 1, length, dtype=torch.bool, device=device).triu_(1)
        self.places = positions[:, 1:, None] + torch.arange(heads.parallel + 1, device=device)

    def attend(self, i: int) -> AttendRows:
        """The attention of layer i: q [rows, length - 1, block, Hq, D], k and v of H heads -> as q."""

        def read(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            groups = q.shape[-2] // k.shape[-2]
            key, value = self.heads.keys_values(i, self.feature)
            key = self._turned(key, self.positions)
            q, k = self._turned(q, self.places), self._turned(k, self.places)
            key, value, k, v = (each.repeat_interleave(groups, -2) for each in (key, value, k, v))
            context = torch.einsum("rtbhd,rshd->rthbs", q, key)
            context = context.masked_fill(self.later[:, None, None], float("-inf"))
            own = torch.einsum("rtbhd,rtchd->rthbc", q, k)
            weights = (torch.cat((context, own), -1) * self.scale).softmax(-1)
            before, inside = weights.split_with_sizes((key.shape[1], k.shape[2]), -1)
            return torch.einsum("rthbs,rshd->rtbhd", before, value) + torch.einsum("rthbc,rtchd->rtbhd", inside, v)

        return read

    def _turned(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [..., n, D], rotated by the positions [...] of its rows."""
        return self.ropes(positions.flatten())(0, x.flatten(0, -3)).view(x.shape)
