"""Heads that read trigrams: the last three tokens stand for a state that is not computed (Chimera, arXiv 2402.15758).

An encoder maps the embeddings of a token and of the two before it to one row, the token's *trigram*. A decoder layer
reads the model's true states and the trigram of the newest token. What comes out at the trigram is the *surrogate* of
the state that the model will have there. An output head reads the last true state and the surrogate. Module names are
those of the authors' code (github.com/kafkayu/Chimera), but for the layer, which they call `fast_layer1.0`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from phasewise.model.config import ModelConfig
from phasewise.speculation.heads.block import AttendRows, FeatureHeads, NormedBlock

GRAM = 3  # embeddings that enter the encoder
HEADS = 4  # output heads, as published


@dataclass(frozen=True)
class TrigramOptions:
    """The options of heads. `heads`: output heads, one for each guess in a row; later guesses are the last one's.
    `own_output`: they give logits themselves, [V, 2 d] each; otherwise a row [d] that the model's output matrix reads.
    `ngram`: different tokens that the encoder reads; below three the newest takes the place of older ones."""

    heads: int = HEADS
    own_output: bool = False
    ngram: int = GRAM


class ResidualBlock(nn.Module):
    """x + SiLU(W x + b), [..., width] -> [..., width]. It begins as the identity."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        for parameter in self.linear.parameters():
            nn.init.zeros_(parameter)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.silu(self.linear(x))


class TrigramHeads(FeatureHeads):
    """Trigram encoder, one decoder layer over states [..., d] and trigrams [..., d], and output heads. A feature is the
    model's last state after its final norm."""

    kind: ClassVar[str] = "chimera"

    def __init__(self, config: ModelConfig, options: TrigramOptions) -> None:
        super().__init__(config)
        d = config.hidden
        self.options, self.row_width, self.steps = options, d, options.heads
        self.trimlp = nn.Sequential(ResidualBlock(GRAM * d), nn.Linear(GRAM * d, d, bias=False))
        self.layers = nn.ModuleList([NormedBlock(config)])
        outputs = config.vocab if options.own_output else d
        each = (nn.Sequential(nn.Linear(2 * d, outputs, bias=False)) for _ in range(options.heads))
        self.chimera_head = nn.ModuleList(each)

    @property
    def block(self) -> NormedBlock:
        return cast(NormedBlock, self.layers[0])

    def inputs(self, embedded: Tensor, feature: Tensor) -> Tensor:
        """A true state enters as it is, whatever token follows."""
        return feature

    def layer(self, i: int, x: Tensor, attend: AttendRows) -> Tensor:
        out: Tensor = self.block(x, attend)
        return out

    def keys_values(self, i: int, feature: Tensor) -> tuple[Tensor, Tensor]:
        """Keys, not rotated yet, and values [..., H, D] of states or surrogates [..., d]."""
        return self.block.self_attn.keys_values(self.block.input_layernorm(feature))

    def reaches_back(self) -> tuple[int, ...]:
        """The distances from a token back to the three whose embeddings make its trigram, the oldest first."""
        return tuple(min(back, self.options.ngram - 1) for back in range(GRAM - 1, -1, -1))

    def trigram(self, embedded: Tensor) -> Tensor:
        """Embeddings [..., 3, d], the oldest first -> trigrams [..., d]."""
        out: Tensor = self.trimlp(embedded.flatten(-2))
        return out

    def read(self, depth: int, state: Tensor, surrogate: Tensor) -> Tensor:
        """The rows to read the guess of a depth, from 0 on, from: the last true state [n, d] and the surrogate [n, d]
        -> [n, d], or logits [n, V] of heads with matrices of their own."""
        head = self.chimera_head[min(depth, len(self.chimera_head) - 1)]
        out: Tensor = head(torch.cat((state, surrogate), -1))
        return out

    def logits(self, output: Tensor, unembed: Callable[[Tensor], Tensor]) -> Tensor:
        """Logits [n, V] float32 of what `read` gives."""
        return (output if self.options.own_output else unembed(output)).float()


def gram_of(tokens: Sequence[int], back: Sequence[int]) -> tuple[int, ...]:
    """The tokens so far behind the last of `tokens`. In front of the first one, that one takes their place."""
    return tuple(tokens[max(0, len(tokens) - 1 - far)] for far in back)
