"""EAGLE's heads: one decoder block that goes on with the target's features (arXiv 2401.15077, 2406.16858, 2503.01840).

Module names are those of published checkpoints: EAGLE's own for EAGLE-1, vLLM's `speculators` for EAGLE-3, whose first
layer EAGLE itself calls `midlayer`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, cast

import torch
from torch import Tensor, nn

from phasewise.model.config import ModelConfig
from phasewise.speculation.heads.block import AttendRows, Block, BlockNorm, FeatureHeads, NormedBlock


class Eagle1(FeatureHeads):
    """EAGLE-1 and EAGLE-2: embedding and feature are projected to one row, which a block without a first norm reads.

    The feature is the target's last state after its final norm, and so is what the block foretells: the target's own
    output head reads it.
    """

    kind: ClassVar[str] = "eagle1"

    def __init__(self, config: ModelConfig, *, bias: bool = True, embeddings: bool = False) -> None:
        super().__init__(config)
        self.fc = nn.Linear(2 * config.hidden, config.hidden, bias=bias)
        self.layers = nn.ModuleList([Block(config, config.hidden)])
        if embeddings:
            self.embed_tokens = nn.Embedding(config.vocab, config.hidden)

    @property
    def block(self) -> Block:
        return cast(Block, self.layers[0])

    def forward(self, embedded: Tensor, feature: Tensor, attend: AttendRows) -> Tensor:
        x = self.fc(torch.cat((embedded, feature), -1))
        return self.block.run(x, x, attend)


MOST_GUESSES = 64  # in a pass of heads that guess any number of tokens


@dataclass(frozen=True)
class Eagle3Options:
    """What EAGLE-3 checkpoints differ in, by the names of `speculators`' config.

    `aux`: the layers that are tapped, and `target_hidden` the width of what they give. `norm_before_residual`: the
    residual is the normed feature. `norm_before_fc`: one norm over all states of the taps, before they are fused;
    `fc_norm`: one for each of them. `norm_output`: the feature of a guess is its output after the final norm.
    `mask`: the token that stands for one not yet guessed, in heads that guess several in one pass; None: in others.
    """

    aux: tuple[int, ...]
    target_hidden: int
    draft_vocab: int
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    embeddings: bool = False
    mask: int | None = None


class Eagle3Block(Block):
    """A block that reads embedding and feature side by side, each after a norm of its own; the residual is the
    feature's."""

    def __init__(self, config: ModelConfig, norm_before_residual: bool) -> None:
        super().__init__(config, 2 * config.hidden)
        self.input_layernorm = BlockNorm(config.hidden, config.eps)
        self.hidden_norm = BlockNorm(config.hidden, config.eps)
        self.norm_before_residual = norm_before_residual

    def forward(self, embedded: Tensor, feature: Tensor, attend: AttendRows) -> Tensor:
        normed = self.hidden_norm(feature)
        x = torch.cat((self.input_layernorm(embedded), normed), -1)
        return self.run(x, normed if self.norm_before_residual else feature, attend)


class Eagle3(FeatureHeads):
    """EAGLE-3: states of several layers are fused to a feature; the last layer's output is passed on as it is; an
    output head of its own foretells tokens of a draft vocabulary. Layers after the first are a model's."""

    kind: ClassVar[str] = "eagle3"

    def __init__(self, config: ModelConfig, options: Eagle3Options) -> None:
        super().__init__(config)
        self.options, self.taps = options, options.aux
        count, d = len(options.aux), config.hidden
        self.fc = nn.Linear(count * options.target_hidden, d, bias=False)
        self.input_norm = BlockNorm(count * options.target_hidden, config.eps) if options.norm_before_fc else None
        each = (BlockNorm(options.target_hidden, config.eps) for _ in range(count))
        self.fc_norm = nn.ModuleList(each) if options.fc_norm else None
        later = (NormedBlock(config) for _ in range(config.layers - 1))
        self.layers = nn.ModuleList([Eagle3Block(config, options.norm_before_residual), *later])
        self.norm = BlockNorm(d, config.eps)
        self.lm_head = nn.Linear(d, options.draft_vocab, bias=False)
        if options.embeddings:
            self.embed_tokens = nn.Embedding(config.vocab, d)
        if options.draft_vocab != config.vocab:
            self.d2t = torch.zeros(options.draft_vocab, dtype=torch.int64)

    def fuse(self, states: Tensor) -> Tensor:
        if self.input_norm is not None:
            states = self.input_norm(states)
        if self.fc_norm is not None:
            parts = states.chunk(len(self.fc_norm), -1)
            states = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts)], -1)
        fused: Tensor = self.fc(states)
        return fused

    @property
    def block(self) -> Eagle3Block:
        return cast(Eagle3Block, self.layers[0])

    def forward(self, embedded: Tensor, feature: Tensor, attend: AttendRows) -> Tensor:
        out: Tensor = self.block(embedded, feature, attend)
        return out

    def layer(self, i: int, x: Tensor, attend: AttendRows) -> Tensor:
        if not i:
            return super().layer(i, x, attend)
        out: Tensor = self.layers[i](x, attend)
        return out

    def passed_on(self, output: Tensor) -> Tensor:
        return self.norm(output) if self.options.norm_output else output

    def final(self, output: Tensor) -> Tensor:
        normed: Tensor = self.norm(output)
        return normed


class PEagle(Eagle3):
    """P-EAGLE: EAGLE-3's heads, trained to guess several tokens in one pass (arXiv 2602.01469).

    Behind the last pair stand rows of the mask token's embedding with a learned feature, `mask_hidden` [1, 1, taps *
    target's d], fused as states are. Row j of them foretells the token j + 1 places after the last pair's guess.
    """

    kind: ClassVar[str] = "peagle"

    def __init__(self, config: ModelConfig, options: Eagle3Options) -> None:
        super().__init__(config, options)
        assert options.mask is not None
        self.parallel, self.mask = MOST_GUESSES, options.mask
        self.mask_hidden = nn.Parameter(torch.zeros(1, 1, len(options.aux) * options.target_hidden))

    def masked_feature(self) -> Tensor:
        return self.fuse(self.mask_hidden[0, 0])
