"""Masked multi-token prediction: mask rows with trained embeddings and low-rank weights of their own, and a sampler
that makes guesses of what the model says after them (arXiv 2507.11851)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class GatedPair(nn.Module):
    """What lies beside one linear layer: `a` [rank, in] and `b` [out, rank]. It begins by adding nothing."""

    def __init__(self, a: tuple[int, ...], b: tuple[int, ...]) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(a) * a[-1] ** -0.5)
        self.b = nn.Parameter(torch.zeros(b))

    def forward(self, x: Tensor) -> Tensor:
        """[T, in] -> [T, out]"""
        return F.linear(F.linear(x, self.a), self.b)


class GatedLowRank(nn.Module):
    """Low-rank weights of mask rows beside the model's linear layers, by the names of `model.lowrank.shapes`."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        super().__init__()
        for name, shape in shapes.items():
            if name.endswith(".a"):
                layer, linear, _ = name.split(".")
                if layer not in self._modules:
                    self.add_module(layer, nn.Module())
                beside = GatedPair(shape, shapes[f"{layer}.{linear}.b"])
                self.get_submodule(layer).add_module(linear, beside)

    def forward(self, layer: int, linear: str, x: Tensor) -> Tensor | None:
        """The addition to a linear layer's output, [T, in] -> [T, out]; None = nothing there."""
        of_layer = self._modules.get(str(layer))
        pair = None if of_layer is None else of_layer._modules.get(linear)
        return None if pair is None else pair(x)


class MaskSampler(nn.Module):
    """Two blocks of Linear, SiLU and LayerNorm, which make a state out of a token's embedding and a mask row's state.
    The model's own output matrix reads it."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(
            nn.Linear(2 * hidden, hidden), nn.SiLU(), nn.LayerNorm(hidden),
            nn.Linear(hidden, hidden), nn.SiLU(), nn.LayerNorm(hidden),
        )  # fmt: skip

    @property
    def scale(self) -> Tensor:
        """What the last norm multiplies by, [d]: how large the states are that it makes."""
        return self.blocks.get_parameter("5.weight")

    def forward(self, embedded: Tensor, state: Tensor) -> Tensor:
        """embedded [n, d] of the token before the one that is guessed; state [n, d] after the final norm -> [n, d]."""
        made: Tensor = self.blocks(torch.cat((embedded, state), -1))
        return made


class MaskedHeads(nn.Module):
    """The embeddings of mask rows `masks` [masks, hidden], their `low_rank` weights and the `sampler`, float32.

    Mask i, from 0 on, behind a text whose last token stands at position t, stands at t + 1 + i. It reads the text and
    the masks before it. The model's state after it, of `layers` layers that run with the low-rank weights, foretells
    the token at t + 2 + i. The sampler guesses that token from this state and the token at t + 1 + i.
    """

    kind: ClassVar[str] = "masked_mtp"

    def __init__(self, hidden: int, masks: int, layers: int, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """`shapes`: those of the low-rank weights, by the names of `model.lowrank.shapes`."""
        super().__init__()
        self.layers = layers
        self.masks = nn.Parameter(torch.zeros(masks, hidden))
        self.low_rank = GatedLowRank(shapes)
        self.sampler = MaskSampler(hidden)

    @property
    def depth(self) -> int:
        """The number of masks."""
        return len(self.masks)

    @property
    def rank(self) -> int:
        """The rank of the low-rank weights; 0: there are none."""
        return next((len(each) for name, each in self.low_rank.named_parameters() if name.endswith(".a")), 0)

    def deltas(self) -> dict[str, Tensor]:
        """The low-rank weights, by the names of `model.lowrank.shapes`."""
        return {name: each.detach() for name, each in self.low_rank.named_parameters()}
