"""DFlash's heads as they are trained: a block of masks behind every token of a text at once (arXiv 2602.06036).

The block of position t holds the token t + 1 and masks. It reads the features up to t and itself, as a draft does, and
no other block. So one pass over a text learns many drafts that could be made of it, a part of them in each step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from phasewise.model.rope import RopeTables
from phasewise.speculation.heads.block import AttendRows, BlockAttention, FeatureHeads, NormedBlock
from phasewise.speculation.heads.dflash import DFlashHeads
from phasewise.speculation.heads.layouts import untrained
from phasewise.train.dense import TokenBlock
from phasewise.train.heads.feature import FeatureKind
from phasewise.train.heads.target import FrozenTarget, SeenBlock

SHARP = 2.0  # of queries: attention to a feature falls with about the third power of its distance
FAR = 0.01  # radians a token: dimensions that turn further tell where a row stands
CONTENT = 0.02  # standard deviation of all that does not tell rows apart
FAINT = 0.4  # of the logits that this gives, which are surer than they should be
FADING = 0.8  # weight of a mask over that of the one before, in what is fitted
GAIN = 4.0  # of queries and keys before their norms, so that a step of training turns them less
RIDGE = 1e-3  # of these least squares, over a mean square of about 1


@dataclass(frozen=True)
class DFlashKind(FeatureKind):
    """Two layers with MLPs half as wide as the model; embeddings and output matrix are its own."""

    kind: str = "dflash"
    every: int = 4  # a block costs as much as a token of it, seven times over, and neighbours learn nearly the same

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
        x, blocks = blocks_of(module, target, seen)
        chosen = slice(seen.first, None, seen.every)
        for i in range(module.config.layers):
            x = module.layer(i, x, blocks.attend(i))
        for head in range(module.parallel):
            wanted = seen.wanted(head)[:, chosen]
            read = x[:, : wanted.shape[1], 1 + head]
            yield module.logits(read[wanted], target.unembed)


@torch.no_grad()
def begin(heads: DFlashHeads, target: FrozenTarget) -> None:
    """Initial weights with which attention reads features and rows as they are."""
    heads.fc.weight.normal_(std=0.005)[:, -target.hidden :] += torch.eye(target.hidden)
    for layer in heads.layers:
        nn.init.eye_(attention(layer).v_proj.weight)
        layer.get_parameter("mlp.down_proj.weight").zero_()


@torch.no_grad()
def look(heads: DFlashHeads, target: FrozenTarget, texts: TokenBlock) -> None:
    """Initial weights with which masks look where there is something to see, and make of it what they can.

    Half of a layer's attention heads read features, the more the later they are; the other half read the root; in the
    next layer the halves change places. What they read becomes the state that the model will be in, as far as a linear
    map can, by least squares. Without such weights masks, which are all the same token, average all features alike,
    and learn slowly where to look.
    """
    seen = target.see(texts, [tap - 1 for tap in heads.taps])
    x, blocks = blocks_of(heads, target, seen)
    masks, real = x[:, :, 1:].clone(), texts.targets[:, :-1] >= 0
    scale = seen.h[texts.targets >= 0].square().mean().sqrt()
    wanted, known = states_foretold(seen, heads.parallel)
    wanted, counted = wanted / scale, FADING ** torch.arange(heads.parallel).expand_as(known)[known]
    for i, layer in enumerate(heads.layers):
        assert isinstance(layer, NormedBlock)
        normed = layer.input_layernorm(x)
        rows = normed[real]
        look_at(heads, i, telling({"feature": blocks.feature[:, :-1][real], "token": rows[:, 0],
                                   "mask": rows[:, 1:].flatten(0, 1)}))  # fmt: skip
        missing = wanted - x[:, :, 1:]
        if i < len(heads.layers) - 1:
            missing += masks  # by which the next layer's queries know their rows
        read = what_is_read(attention(layer), normed, blocks.attend(i))[:, :, 1:][known]
        attention(layer).o_proj.weight.copy_(linear(read, missing[known], counted))
        x = heads.layer(i, x, blocks.attend(i))
    heads.norm.weight.fill_(FAINT * float(scale * x[:, :, 1:][known].square().mean().sqrt()))


def look_at(heads: DFlashHeads, i: int, says: Mapping[str, Tensor]) -> None:
    """Set queries and keys of layer i: those of masks, and of features in one half of its heads, roots in the other."""
    config, block, half = heads.config, attention(heads.layers[i]), heads.config.hidden // 2
    assert block.q_norm is not None and config.kv_heads == config.heads
    turning = torch.zeros(config.head_dim)
    turning[: sum(x > FAR for x in config.ropes[0].inverse)] = 1.0
    turning = (GAIN * (config.head_dim / turning.sum()) ** 0.5 * turning).repeat(config.heads)
    for each in (block.q_proj, block.k_proj):
        each.weight.normal_(std=GAIN * CONTENT)
    block.q_norm.weight.fill_(SHARP)
    block.q_proj.weight += torch.outer(turning, says["mask"])
    kinds = ("feature", "token") if i % 2 == 0 else ("token", "feature")
    for kind, rows in zip(kinds, (slice(half), slice(half, None))):
        block.k_proj.weight[rows] += torch.outer(turning[rows], says[kind])


def what_is_read(block: BlockAttention, x: Tensor, attend: AttendRows) -> Tensor:
    """What enters the output matrix of an attention for rows x [..., d], [..., Hq * D]."""
    found = list[Tensor]()

    def kept(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        found.append(attend(q, k, v))
        return found[-1]

    block(x, kept)
    return found[-1].flatten(-2)


def states_foretold(seen: SeenBlock, masks: int) -> tuple[Tensor, Tensor]:
    """The model's states [rows, length - 1, masks, d] that say what stands in the places of masks, and where there are
    some, bool [rows, length - 1, masks]."""
    h, real = seen.h, seen.block.targets >= 0
    states = [F.pad(h[:, 1 + ahead :], (0, 0, 0, ahead)) for ahead in range(masks)]
    known = [F.pad(real[:, 1 + ahead :], (0, ahead)) for ahead in range(masks)]
    return torch.stack(states, 2), torch.stack(known, 2)


def linear(x: Tensor, y: Tensor, weights: Tensor) -> Tensor:
    """The matrix [d', d] that makes y [n, d'] of x [n, d], by least squares; rows count as `weights` [n] say."""
    weighed = x * (weights / weights.sum())[:, None]
    found: Tensor = torch.linalg.solve(weighed.T @ x + RIDGE * torch.eye(x.shape[1]), weighed.T @ y)
    return found.T


def attention(layer: nn.Module) -> BlockAttention:
    """The attention of a layer."""
    assert isinstance(layer, NormedBlock) and isinstance(layer.self_attn, BlockAttention)
    return layer.self_attn


def telling(rows: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """For each kind of rows [n, d] a direction [d] on which they are 1, and those of other kinds -1, by least squares.
    All kinds count alike."""
    width = next(iter(rows.values())).shape[1]
    square = sum(x.T @ x / len(x) for x in rows.values()) + RIDGE * torch.eye(width)
    each = {kind: torch.linalg.solve(square, 2 * x.mean(0)) for kind, x in rows.items()}
    return {kind: direction - sum(each.values()) / 2 for kind, direction in each.items()}


def blocks_of(heads: DFlashHeads, target: FrozenTarget, seen: SeenBlock) -> tuple[Tensor, BlocksOverText]:
    """The rows [rows, n, block, d] of the blocks of a text, a root and masks each, and their attention. A block for
    each position but the last, or for those that are learned."""
    ids = seen.block.ids[:, 1:][:, seen.first :: seen.every]
    feature = heads.fuse(torch.cat([seen.taps[tap - 1] for tap in heads.taps], -1))
    masks = torch.full((*ids.shape, heads.parallel), heads.mask, device=ids.device)
    rows = target.embed(torch.cat((ids[..., None], masks), -1))
    return rows, BlocksOverText(heads, seen.block.positions, feature, slice(seen.first, None, seen.every))


class BlocksOverText:
    """The attention of a text's blocks [rows, n, block], over features [rows, length, d] and themselves."""

    def __init__(self, heads: DFlashHeads, positions: Tensor, feature: Tensor, chosen: slice = slice(None)) -> None:
        """`positions` int64 [rows, length]: of the features' tokens. `chosen`: the positions but the last that have
        blocks."""
        self.heads, self.feature, self.positions = heads, feature, positions
        self.scale = heads.config.attention[0].scale
        self.ropes = RopeTables(heads.config.ropes, heads.config.max_positions, torch.float32, positions.device)
        length, device = positions.shape[1], positions.device
        self.later = torch.ones(length - 1, length, dtype=torch.bool, device=device).triu_(1)[chosen]
        self.places = positions[:, 1:][:, chosen, None] + torch.arange(heads.parallel + 1, device=device)

    def attend(self, i: int) -> AttendRows:
        """The attention of layer i: q [rows, n, block, Hq, D], k and v of H heads -> as q."""

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
