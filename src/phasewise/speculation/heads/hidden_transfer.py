"""Hidden Transfer's maps: a row between two layers becomes the pseudo hidden states of tokens that come after it (arXiv
2404.12022)."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn


class TransferMaps(nn.Module):
    """Linear maps without a bias, `maps` of them, behind the first `layer` of the model's `layers` layers.

    Map i, from 0 on, makes of the row at position t what stands in for the row at t + 1 + i; once the other layers have
    run, that foretells the token at t + 2 + i.

    All begin as the identity: a pseudo row is then the row itself, one or more places further on.
    """

    kind: ClassVar[str] = "hidden_transfer"

    def __init__(self, hidden: int, maps: int, layer: int, layers: int) -> None:
        super().__init__()
        self.maps = nn.ModuleList(nn.Linear(hidden, hidden, bias=False) for _ in range(maps))
        self.layer, self.layers = layer, layers
        for each in self.maps:
            nn.init.eye_(each.get_parameter("weight"))

    @property
    def depth(self) -> int:
        """The number of maps."""
        return len(self.maps)

    def forward(self, x: Tensor) -> Tensor:
        """Rows after the model's first `layer` layers, [..., d] -> their pseudo rows [..., maps, d]."""
        return torch.stack([each(x) for each in self.maps], -2)
