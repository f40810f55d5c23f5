"""Hydra's heads (arXiv 2402.05109): Medusa's, which also read the embeddings of the tokens guessed before their own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from phasewise.errors import UserError
from phasewise.speculation.heads.folder import StoredHeads
from phasewise.speculation.heads.last_state import LastStateHeads, filled
from phasewise.speculation.heads.medusa import ResidualBlocks


@dataclass(frozen=True)
class HydraShape:
    """The sizes of a set of heads: width `hidden`, `heads` of them, of `layers` blocks each, the first one wide.

    `rank` 0: the maps of the wide block are full matrices, as the paper has them. Otherwise each is a product of two of
    that rank, and h itself is added, for a full residual map would carry it. `own_head`, `head_bias`: output matrices
    [vocab, hidden] of their own, with or without a bias.
    """

    hidden: int
    vocab: int
    heads: int = 4
    layers: int = 1
    rank: int = 0
    own_head: bool = False
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
    reads_path: ClassVar[bool] = True

    def __init__(self, shape: HydraShape) -> None:
        super().__init__()
        self.shape, self.depth = shape, shape.heads
        self.wide = nn.ModuleList(WideBlock(shape.hidden, head + 2, shape.rank) for head in range(shape.heads))
        self.blocks = nn.ModuleList(ResidualBlocks(shape.hidden, shape.layers - 1, True) for _ in range(shape.heads))
        outputs = (nn.Linear(shape.hidden, shape.vocab, bias=shape.head_bias) for _ in range(shape.heads))
        self.lm_heads = nn.ModuleList(outputs) if shape.own_head else None

    def state(self, head: int, h: Tensor, path: Tensor | None) -> Tensor:
        assert path is not None
        x = torch.cat((h, path[:, : head + 1].flatten(1)), 1)
        state: Tensor = self.blocks[head](self.wide[head](x))
        return state

    def config(self) -> dict[str, Any]:
        shape = self.shape
        return {
            "architectures": ["HydraModel"],
            "model_type": "hydra",
            "speculators_model_type": "hydra",
            "hidden_size": shape.hidden,
            "vocab_size": shape.vocab,
            "num_heads": shape.heads,
            "num_hidden_layers": shape.layers,
            "rank": shape.rank,
            "original_lm_head": not shape.own_head,
            "lm_head_bias": shape.head_bias,
        }

    @classmethod
    def of(cls, stored: StoredHeads) -> HydraHeads:
        number = stored.number
        shape = HydraShape(number("hidden_size"), number("vocab_size"), number("num_heads"),
                           number("num_hidden_layers", 1), number("rank", 0),
                           not stored.config.get("original_lm_head", False),
                           bool(stored.config.get("lm_head_bias", False)))  # fmt: skip
        if not shape.heads or not shape.layers:
            raise UserError(f"{stored.path}: num_heads={shape.heads} and num_hidden_layers={shape.layers} must be at "
                            "least 1")  # fmt: skip
        with torch.device("meta"):
            made = cls(shape)
        made = made.to_empty(device="cpu")
        filled(made, stored)
        return made

    @classmethod
    def untrained(cls, hidden: int, vocab: int) -> HydraHeads:
        return cls(HydraShape(hidden, vocab))
