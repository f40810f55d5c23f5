"""PPD's prompt tokens: trained embeddings that stand behind a token in place of those to come (arXiv 2405.18628)."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn


class PromptTokens(nn.Module):
    """Rows `embeddings` [prompts, hidden] with which prompt tokens enter the model's first layer, float32.

    Prompt token i, from 0 on, behind a text whose last token stands at position t, stands at t + 1 + i. It reads the
    text and the prompt tokens before it. What the model, of `layers` layers, says after it foretells the token at
    t + 2 + i.

    All begin as zeros; training has them begin as embeddings of tokens.
    """

    kind: ClassVar[str] = "ppd"

    def __init__(self, hidden: int, prompts: int, layers: int) -> None:
        super().__init__()
        self.layers = layers
        self.embeddings = nn.Parameter(torch.zeros(prompts, hidden))

    @property
    def depth(self) -> int:
        """The number of prompt tokens."""
        return len(self.embeddings)

    def forward(self) -> Tensor:
        """The rows of all prompt tokens, [prompts, d]."""
        return self.embeddings
