"""Medusa's heads (arXiv 2401.10774): each guesses one later token from the model's last state, none sees the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.nn import functional as F

from phasewise.errors import UserError
from phasewise.speculation.heads.folder import StoredHeads
from phasewise.speculation.heads.last_state import HeadsShape, LastStateHeads


@dataclass(frozen=True)
class MedusaShape(HeadsShape):
    """Sizes; `layers`: residual blocks of a head, `bias`: whether these have one."""

    bias: bool = True


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
    architecture: ClassVar[str] = "MedusaModel"
    reads_path: ClassVar[bool] = False

    def __init__(self, shape: MedusaShape) -> None:
        super().__init__(shape)
        self.bias = shape.bias
        self.blocks = nn.ModuleList(ResidualBlocks(shape.hidden, shape.layers, shape.bias) for _ in range(shape.heads))
        self.lm_heads = self.output_matrices()

    def state(self, head: int, h: Tensor, path: Tensor | None) -> Tensor:
        state: Tensor = self.blocks[head](h)
        return state

    def config(self) -> dict[str, Any]:
        return super().config() | {"truncated_vocab_size": self.shape.vocab, "medusa_fc_bias": self.bias}

    @classmethod
    def described(cls, stored: StoredHeads, common: HeadsShape) -> MedusaHeads:
        known = stored.number("truncated_vocab_size", common.vocab)
        if known != common.vocab:
            raise UserError(f"{stored.path}: heads over a truncated vocabulary (truncated_vocab_size={known}, "
                            f"vocab_size={common.vocab}) are not supported")  # fmt: skip
        return cls(MedusaShape(**vars(common), bias=bool(stored.config.get("medusa_fc_bias", False))))

    @classmethod
    def untrained(cls, hidden: int, vocab: int) -> MedusaHeads:
        return cls(MedusaShape(hidden, vocab))
