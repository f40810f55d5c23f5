"""Medusa's heads (arXiv 2401.10774): each guesses one later token from the model's last state, none sees the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from phasewise.errors import UserError
from phasewise.speculation.heads.folder import StoredHeads
from phasewise.speculation.heads.last_state import LastStateHeads, filled


@dataclass(frozen=True)
class MedusaShape:
    """The sizes of a set of heads: width `hidden`, `heads` of them, of `layers` residual blocks each.

    `own_head`: each has an output matrix [vocab, hidden] of its own; otherwise all read out through the model's.
    """

    hidden: int
    vocab: int
    heads: int = 4
    layers: int = 1
    bias: bool = True
    own_head: bool = False


class ResidualBlocks(nn.Module):
    """x + SiLU(W x + b), several times, [n, d] -> [n, d]. W begins at zero, so that all begin as the identity."""

    def __init__(self, hidden: int, layers: int, bias: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(hidden, hidden, bias) for _ in range(layers))
        for layer in self.layers:
            for parameter in layer.parameters():
                nn.init.zeros_(parameter)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + F.silu(layer(x))
        return x


class MedusaHeads(LastStateHeads):
    """Head i: residual blocks over h, then an output matrix. Tensors are named as vLLM's `MedusaModel` names them."""

    kind: ClassVar[str] = "medusa"
    reads_path: ClassVar[bool] = False

    def __init__(self, shape: MedusaShape) -> None:
        super().__init__()
        self.shape, self.depth = shape, shape.heads
        self.blocks = nn.ModuleList(ResidualBlocks(shape.hidden, shape.layers, shape.bias) for _ in range(shape.heads))
        outputs = (nn.Linear(shape.hidden, shape.vocab, bias=False) for _ in range(shape.heads))
        self.lm_heads = nn.ModuleList(outputs) if shape.own_head else None

    def state(self, head: int, h: Tensor, path: Tensor | None) -> Tensor:
        state: Tensor = self.blocks[head](h)
        return state

    def config(self) -> dict[str, Any]:
        shape = self.shape
        return {
            "architectures": ["MedusaModel"],
            "model_type": "medusa",
            "speculators_model_type": "medusa",
            "hidden_size": shape.hidden,
            "vocab_size": shape.vocab,
            "truncated_vocab_size": shape.vocab,
            "num_heads": shape.heads,
            "num_hidden_layers": shape.layers,
            "medusa_fc_bias": shape.bias,
            "original_lm_head": not shape.own_head,
        }

    @classmethod
    def of(cls, stored: StoredHeads) -> MedusaHeads:
        number = stored.number
        vocab, heads = number("vocab_size"), number("num_heads")
        if number("truncated_vocab_size", vocab) != vocab:
            truncated = stored.config["truncated_vocab_size"]
            raise UserError(f"{stored.path}: heads over a truncated vocabulary (truncated_vocab_size={truncated}, "
                            f"vocab_size={vocab}) are not supported")  # fmt: skip
        if not heads:
            raise UserError(f"{stored.path}: num_heads=0: there must be at least one head")
        config = stored.config
        shape = MedusaShape(number("hidden_size"), vocab, heads, number("num_hidden_layers", 1),
                            bool(config.get("medusa_fc_bias", False)),
                            not config.get("original_lm_head", False))  # fmt: skip
        with torch.device("meta"):
            made = cls(shape)
        made = made.to_empty(device="cpu")
        filled(made, stored)
        return made

    @classmethod
    def untrained(cls, hidden: int, vocab: int) -> MedusaHeads:
        return cls(MedusaShape(hidden, vocab))
