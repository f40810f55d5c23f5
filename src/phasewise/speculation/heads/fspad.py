"""FSPAD's heads: EAGLE's block with a token-gated input and two outputs (arXiv 2408.15562).

Module names are those of the authors' code (github.com/Luc4Gui/FSPAD).
"""

from __future__ import annotations

from typing import ClassVar, cast

import torch
from torch import Tensor, nn

from phasewise.model.config import ModelConfig
from phasewise.speculation.heads.block import AttendRows, Block, BlockNorm, FeatureHeads, GatedMLP


class TokenGatedInput(nn.Module):
    """Embedding and feature are projected to one row u [..., d], to which a gated MLP of u is added: the embedding of
    the token is what its gate reads. The paper calls this feature sampling."""

    def __init__(self, config: ModelConfig, bias: bool) -> None:
        super().__init__()
        self.fc = nn.Linear(2 * config.hidden, config.hidden, bias=bias)
        self.mlp = GatedMLP(config)
        self.post_attention_layernorm = BlockNorm(config.hidden, config.eps)

    def forward(self, embedded: Tensor, feature: Tensor) -> Tensor:
        u = self.fc(torch.cat((embedded, feature), -1))
        out: Tensor = u + self.mlp(self.post_attention_layernorm(u), embedded)
        return out


class TwoOutputBlock(Block):
    """A block whose MLP gives two rows, each added to the same residual: [..., 2 d]."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config, config.hidden)
        self.mlp = GatedMLP(config, 2 * config.hidden)

    def run(self, x: Tensor, residual: Tensor, attend: AttendRows) -> Tensor:
        residual = residual + self.self_attn(x, attend)
        out: Tensor = torch.cat((residual, residual), -1) + self.mlp(self.post_attention_layernorm(residual))
        return out


class Fspad(FeatureHeads):
    """EAGLE-1's heads with FSPAD's two changes. The first half of an output [..., 2 d] is read by the target's output
    head, the second half is the feature that is passed on. In training each half has a loss of its own (partial
    alignment), so that neither has to be both."""

    kind: ClassVar[str] = "fspad"

    def __init__(self, config: ModelConfig, *, bias: bool = True, embeddings: bool = False) -> None:
        super().__init__(config)
        self.fc = TokenGatedInput(config, bias)
        self.layers = nn.ModuleList([TwoOutputBlock(config)])
        if embeddings:
            self.embed_tokens = nn.Embedding(config.vocab, config.hidden)

    @property
    def block(self) -> TwoOutputBlock:
        return cast(TwoOutputBlock, self.layers[0])

    def forward(self, embedded: Tensor, feature: Tensor, attend: AttendRows) -> Tensor:
        x = self.fc(embedded, feature)
        return self.block.run(x, x, attend)

    def passed_on(self, output: Tensor) -> Tensor:
        return output[..., self.config.hidden :]

    def final(self, output: Tensor) -> Tensor:
        return output[..., : self.config.hidden]
