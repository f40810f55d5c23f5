"""DFlash's heads: a small model that fills a block of masks in one pass (arXiv 2602.06036).

Its layers read the target's features as keys and values: every layer projects the feature of a token as if it were a
row of its own. The rows that run are the root, which is the last known token, and masks behind it. They see all
features and one another, later ones too. The row of a mask foretells the token in its own place. Module names are those
of published checkpoints, which have no embeddings and no output head but the target's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from phasewise.model.config import ModelConfig
from phasewise.speculation.heads.block import BlockAttention, BlockNorm, LayeredHeads, NormedBlock


@dataclass(frozen=True)
class DFlashOptions:
    """What checkpoints differ in. `aux`: the states that features are made of, i being what enters layer i of the
    target. `block`: the root and the masks of a pass. `mask`: the token that masks are embedded as. `embeddings` and
    `head`: whether the heads have their own; `draft_vocab`: the tokens that an own head foretells."""

    aux: tuple[int, ...]
    block: int
    mask: int
    draft_vocab: int
    embeddings: bool = False
    head: bool = False


class DFlashHeads(LayeredHeads):
    """Layers of a model, over features of the target and a block of masks."""

    kind: ClassVar[str] = "dflash"
    features_cached: ClassVar[bool] = True

    def __init__(self, config: ModelConfig, options: DFlashOptions) -> None:
        super().__init__(config)
        self.options, self.taps = options, options.aux
        self.parallel, self.mask = options.block - 1, options.mask
        self.fc = nn.Linear(len(options.aux) * config.hidden, config.hidden, bias=False)
        self.hidden_norm = BlockNorm(config.hidden, config.eps)
        if options.embeddings:
            self.embed_tokens = nn.Embedding(config.vocab, config.hidden)
        if options.head:
            self.lm_head = nn.Linear(config.hidden, options.draft_vocab, bias=False)
            if options.draft_vocab != config.vocab:
                self.d2t = torch.zeros(options.draft_vocab, dtype=torch.int64)

    def fuse(self, states: Tensor) -> Tensor:
        feature: Tensor = self.hidden_norm(self.fc(states))
        return feature

    def keys_values(self, i: int, feature: Tensor) -> tuple[Tensor, Tensor]:
        block = self.layers[i]
        assert isinstance(block, NormedBlock) and isinstance(block.self_attn, BlockAttention)
        return block.self_attn.keys_values(feature)
