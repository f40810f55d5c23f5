"""Hydra's heads (arXiv 2402.05109): Medusa's, which also read the embeddings of the tokens guessed before their own.

Hydra++ has a prefix layer before them: one decoder layer over the model's last states, with keys and values of its own.
Its output takes the place of the last state.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from phasewise.errors import UserError
from phasewise.speculation.heads.block import LayeredHeads
from phasewise.speculation.heads.folder import StoredHeads
from phasewise.speculation.heads.last_state import HeadsShape, LastStateHeads
from phasewise.speculation.heads.medusa import ResidualBlocks


@dataclass(frozen=True)
class HydraShape(HeadsShape):
    """Sizes; `layers`: blocks of a head, of which the first is wide; `head_bias`: output matrices have one.

    `rank` 0: the maps of the wide block are full matrices, as the paper has them. Otherwise each is a product of two of
    that rank, and h itself is added, for a full residual map would carry it.
    """

    rank: int = 0
    head_bias: bool = False


class WideMap(nn.Module):
    """A linear map [n, in] -> [n, out] with a bias, or the product of two maps of a rank. It begins at zero."""

    def __init__(self, inputs: int, outputs: int, rank: int) -> None:
        super().__init__()
        self.down = nn.Linear(inputs, rank, bias=False) if rank else nn.Identity()
        self.up = nn.Linear(rank or inputs, outputs)
        for parameter in self.up.parameters():
            nn.init.zeros_(parameter)
        if rank:
            nn.init.normal_(self.down.weight, std=inputs**-0.5)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.up(self.down(x))
        return out


class WideBlock(nn.Module):
    """R x + SiLU(W x), x [n, parts * d] -> [n, d]. It begins by giving x's first part, h, as it is."""

    def __init__(self, hidden: int, parts: int, rank: int) -> None:
        super().__init__()
        self.hidden, self.rank = hidden, rank
        self.linear = WideMap(parts * hidden, hidden, rank)
        self.residual = WideMap(parts * hidden, hidden, rank)
        if not rank:
            with torch.no_grad():
                self.residual.up.weight[:, :hidden] = torch.eye(hidden)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.residual(x) + F.silu(self.linear(x))
        return out + x[:, : self.hidden] if self.rank else out


class HydraHeads(LastStateHeads):
    """Head i reads h and i + 1 embeddings, one beside the other: a wide block, residual blocks, an output matrix."""

    kind: ClassVar[str] = "hydra"
    architecture: ClassVar[str] = "HydraModel"
    reads_path: ClassVar[bool] = True

    def __init__(self, shape: HydraShape) -> None:
        super().__init__(shape)
        self.rank, self.head_bias = shape.rank, shape.head_bias
        self.wide = nn.ModuleList(WideBlock(shape.hidden, head + 2, shape.rank) for head in range(shape.heads))
        self.blocks = nn.ModuleList(ResidualBlocks(shape.hidden, shape.layers - 1, True) for _ in range(shape.heads))
        self.lm_heads = self.output_matrices(shape.head_bias)
        self.prefix_layer: PrefixLayer | None = None  # what gives h, while the two are trained together

    def state(self, head: int, h: Tensor, path: Tensor | None) -> Tensor:
        assert path is not None
        x = torch.cat((h, path[:, : head + 1].flatten(1)), 1)
        state: Tensor = self.blocks[head](self.wide[head](x))
        return state

    def config(self) -> dict[str, Any]:
        return super().config() | {"rank": self.rank, "lm_head_bias": self.head_bias}

    @classmethod
    def described(cls, stored: StoredHeads, common: HeadsShape) -> HydraHeads:
        if not common.layers:
            raise UserError(f"{stored.path}: num_hidden_layers=0 must be at least 1")
        bias = bool(stored.config.get("lm_head_bias", False))
        return cls(HydraShape(**vars(common), rank=stored.number("rank", 0), head_bias=bias))

    @classmethod
    def untrained(cls, hidden: int, vocab: int) -> HydraHeads:
        return cls(HydraShape(hidden, vocab))


class PrefixLayer(LayeredHeads):
    """The prefix layer of Hydra++. The feature of a token, its state after the final norm, is a row; what comes out is
    normed once more."""

    kind: ClassVar[str] = "hydra"
