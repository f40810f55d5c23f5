"""A small head that says how likely a draft model's guess is to be accepted (SpecDec++, arXiv 2405.19715)."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

REJECT, ACCEPT = 0, 1  # classes


def shapes(width: int, blocks: int) -> dict[str, tuple[int, ...]]:
    """The tensors of a head of so many residual blocks over states of this width."""
    block = {} if not blocks else {"blocks.weight": (blocks, width, width), "blocks.bias": (blocks, width)}
    return {**block, "out.weight": (2, width), "out.bias": (2,)}


def classes(tensors: Mapping[str, Tensor], states: Tensor) -> Tensor:
    """Logits float32 [n, 2] of both classes, of states [n, d]: blocks of h + SiLU(W h + b), then a linear map."""
    h = states.float()
    if "blocks.weight" in tensors:
        for weight, bias in zip(tensors["blocks.weight"], tensors["blocks.bias"]):
            h = h + F.silu(F.linear(h, weight, bias))
    return F.linear(h, tensors["out.weight"], tensors["out.bias"])


class AcceptanceHead:
    """The head as it serves. `norm` is the draft model's final one: what the head reads is what its output matrix
    reads. All of it is computed in float32."""

    def __init__(self, tensors: Mapping[str, Tensor], norm: Callable[[Tensor], Tensor], device: torch.device) -> None:
        self.tensors = {name: tensor.to(device, torch.float32) for name, tensor in tensors.items()}
        self.norm = norm

    def __call__(self, row: Tensor) -> float:
        """The chance that the token is accepted behind which the draft model's last layer left `row` [1, d]."""
        return float(classes(self.tensors, self.norm(row)).softmax(-1)[0, ACCEPT])
