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
from phasewise.speculation.heads.block import AttendRows, BlockAttention, FeatureHeads, NormedBlock
from phasewise.speculation.heads.dflash import DFlashHeads
from phasewise.speculation.heads.layouts import untrained
from phasewise.train.dense import TokenBlock
from phasewise.train.heads.feature import FeatureKind
from phasewise.train.heads.target import FrozenTarget, SeenBlock

FAINT = 0.05  # of the model's logits: those of an average of states are large, and surely wrong
SHARP = 2.0  # of queries: attention to a feature falls with about the third power of its distance
FAR = 0.01  # radians a token: dimensions that turn further tell where a row stands
CONTENT = 0.02  # standard deviation of all that does not tell rows apart
RIDGE = 1e-3  # of these least squares, over a mean square of about 1


@dataclass(frozen=True)
class DFlashKind(FeatureKind):
    """Two layers with MLPs half as wide as the model; embeddings and output matrix are its own."""

    kind: str = "dflash"

    def build(self, target: FrozenTarget, depth: int, vocabulary: Tensor | None = None) -> FeatureHeads:
        made = untrained(self.kind, target.model, narrow=True, guesses=depth)
        made.steps = depth
        assert isinstance(made, DFlashHeads)
        begin(made, target)
        return made.to(target.output.device)

    def begin(self, module: FeatureHeads, target: FrozenTarget, texts: TokenBlock) -> None:
        assert isinstance(module, DFlashHeads)
        look(module, target, texts)

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
def begin(heads: DFlashHeads, target: FrozenTarget) -> None:
    """Initial weights with which what attention reads is added as it is, and nothing else."""
    heads.fc.weight.normal_(std=0.005)[:, -target.hidden :] += torch.eye(target.hidden)
    for _, block in attentions(heads):
        nn.init.eye_(block.v_proj.weight)
        nn.init.eye_(block.o_proj.weight)
    for layer in heads.layers:
        layer.get_parameter("mlp.down_proj.weight").zero_()
    heads.norm.weight.copy_(FAINT * target.model.norm.weight)


@torch.no_grad()
def look(heads: DFlashHeads, target: FrozenTarget, texts: TokenBlock) -> None:
    """Initial weights with which masks read, in half of the attention heads, the features of the text, the more the
    later they are, and in the other half the root; in the next layer those halves change places.

    Without them masks, which are all the same token, average all features alike, and learn slowly where to look.
    """
    config, says = heads.config, telling(heads, target, texts)
    turning = torch.zeros(config.head_dim)
    turning[: sum(x > FAR for x in config.ropes[0].inverse)] = 1.0
    turning *= (config.head_dim / turning.sum()) ** 0.5
    for i, block in attentions(heads):
        assert block.q_norm is not None and config.kv_heads == config.heads
        block.q_norm.weight.fill_(SHARP)
        queries, keys = (
            each.weight.normal_(std=CONTENT).view(config.heads, config.head_dim, -1)
            for each in (block.q_proj, block.k_proj)
        )
        for head in range(config.heads):
            first = head < config.heads // 2
            queries[head] += torch.outer(turning, says["mask"])
            keys[head] += torch.outer(turning, says["feature" if first == (i % 2 == 0) else "token"])


def attentions(heads: DFlashHeads) -> Iterator[tuple[int, BlockAttention]]:
    """The attention of each layer, by its number."""
    for i, block in enumerate(heads.layers):
        assert isinstance(block, NormedBlock) and isinstance(block.self_attn, BlockAttention)
        yield i, block.self_attn


def telling(heads: DFlashHeads, target: FrozenTarget, texts: TokenBlock) -> dict[str, Tensor]:
    """Directions [d] on which rows that enter attention are 1 if they are features, tokens or the mask, and -1 if they
    are others: least squares over texts."""
    first, real = heads.layers[0], texts.targets >= 0
    assert isinstance(first, NormedBlock)
    seen = target.see(texts, [tap - 1 for tap in heads.taps])
    tokens = {"token": texts.ids[real], "mask": torch.tensor([heads.mask], device=real.device)}
    rows = {kind: first.input_layernorm(target.embed(ids)) for kind, ids in tokens.items()}
    rows["feature"] = heads.fuse(torch.cat([seen.taps[tap - 1][real] for tap in heads.taps], -1))
    square = sum(x.T @ x / len(x) for x in rows.values()) + RIDGE * torch.eye(target.hidden)
    each = {kind: torch.linalg.solve(square, 2 * x.mean(0)) for kind, x in rows.items()}
    return {kind: direction - sum(each.values()) / 2 for kind, direction in each.items()}


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
