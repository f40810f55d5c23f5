"""Kangaroo's adapter: attention over what the model's first layers make of tokens, before the model's own output head
(arXiv 2404.18911)."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor, nn

from phasewise.model.config import ModelConfig
from phasewise.speculation.heads.block import AttendRows, BlockAttention, BlockNorm, LayeredHeads


class AdapterLayer(nn.Module):
    """Attention that reads its rows after a norm, added to them: [..., d] -> [..., d]. There is no MLP."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm = BlockNorm(config.hidden, config.eps)
        self.self_attn = BlockAttention(config, config.hidden)

    def forward(self, x: Tensor, attend: AttendRows) -> Tensor:
        out: Tensor = x + self.self_attn(self.input_layernorm(x), attend)
        return out


class ExitAdapter(LayeredHeads):
    """One adapter layer behind the model's first `exit` layers, then a norm and the model's output head. Row p is made
    of the token at p, and foretells the token at p + 1."""

    kind: ClassVar[str] = "kangaroo"

    def __init__(self, config: ModelConfig, exit: int) -> None:
        super().__init__(config)
        self.taps = (exit,)

    def made(self, config: ModelConfig) -> nn.Module:
        return AdapterLayer(config)

    @property
    def exit(self) -> int:
        """The number of the model's layers that make its rows."""
        return self.taps[0]
