"""Clover's heads (arXiv 2405.00263): Medusa's, behind an augmenting block, with a state that takes in each guess.

The augmenting block is a decoder layer behind the model's last one, with keys and values of its own. Its output after
a norm is the state s_0 of a text. The attention decoder makes s_i of s_{i-1} and of one token, so it has one key. An
MLP for each step reads s_i, and the model's own output matrix reads what the MLP gives.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from phasewise.model.config import ModelConfig
from phasewise.speculation.heads.block import BlockNorm, LayeredHeads
from phasewise.speculation.heads.medusa import ResidualBlocks


class AttentionDecoder(nn.Module):
    """s + gate(Q, K) * V for states s [..., d] and tokens e [..., d] -> [..., d], by attention heads of d / `heads`
    numbers. Q is made of s after a norm, K and V are made of e.

    A softmax over one key is always 1. So the gate of a head is the cosine of its query and its key, from -1 to 1.
    """

    def __init__(self, hidden: int, heads: int, eps: float) -> None:
        super().__init__()
        self.heads = heads
        self.input_norm = BlockNorm(hidden, eps)
        self.query, self.key, self.value = (nn.Linear(hidden, hidden) for _ in range(3))

    def forward(self, state: Tensor, token: Tensor) -> Tensor:
        parts = (self.query(self.input_norm(state)), self.key(token), self.value(token))
        q, k, v = (each.unflatten(-1, (self.heads, -1)) for each in parts)
        gate = F.cosine_similarity(q.float(), k.float(), dim=-1).to(v.dtype)
        out: Tensor = state + (gate[..., None] * v).flatten(-2)
        return out


class CloverHeads(LayeredHeads):
    """Heads for `guesses` tokens in a row, behind `layers` layers of the target; `decoder_heads`: of the attention
    decoder. Row p is the residual stream behind the target's last layer at token p, and the root is the token p + 1."""

    kind: ClassVar[str] = "clover"

    def __init__(self, config: ModelConfig, layers: int, guesses: int, decoder_heads: int) -> None:
        super().__init__(config)
        self.taps, self.steps = (layers,), guesses
        self.decoder = AttentionDecoder(config.hidden, decoder_heads, config.eps)
        self.mlps = nn.ModuleList(ResidualBlocks(config.hidden, 1, True) for _ in range(guesses))

    @property
    def guesses(self) -> int:
        """The most guesses in a row: there is an MLP for each."""
        return len(self.mlps)

    def begun(self, output: Tensor) -> Tensor:
        """Outputs [..., d] of the augmenting block -> states s_0 [..., d]."""
        return self.final(output)

    def onward(self, state: Tensor, token: Tensor) -> Tensor:
        """The states [..., d] one step on. token [..., d]: rows of `token_rows`."""
        out: Tensor = self.decoder(state, token)
        return out

    def read(self, step: int, state: Tensor) -> Tensor:
        """The rows that the output matrix reads of states s_{step + 1} [n, d], [n, d]."""
        out: Tensor = self.mlps[step](state)
        return out


def token_rows(rows: Tensor) -> Tensor:
    """Tokens as the attention decoder reads them: rows [..., d] of the output matrix over their root mean square.

    The paper divides by the norm, which is the same up to the factor sqrt(d) in the weights that read it.
    """
    wide = rows.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-12)).to(rows.dtype)
