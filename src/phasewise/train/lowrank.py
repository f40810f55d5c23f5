"""Low-rank weights while they are trained: the differentiable twin of `model.lowrank.Delta`, under the same names."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class LowRank(nn.Module):
    """Trained beside a frozen decoder; at first it changes nothing (`b` is zero)."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        super().__init__()
        self.names = tuple(shapes)
        for name, shape in shapes.items():
            start = torch.zeros(shape) if name.endswith(".b") else torch.randn(shape) * shape[-1] ** -0.5
            self.register_parameter(_key(name), nn.Parameter(start))

    def forward(self, layer: int, linear: str, x: Tensor) -> Tensor | None:
        """The addition to a linear layer's output, [tokens, in] -> [tokens, out]; None = nothing there."""
        name = f"{layer}.{linear}"
        if f"{name}.a" not in self.names:
            return None
        return F.linear(F.linear(x, self[f"{name}.a"]), self[f"{name}.b"])

    def __getitem__(self, name: str) -> Tensor:
        return self.get_parameter(_key(name))

    def tensors(self) -> dict[str, Tensor]:
        """All of them, by their names in the artefact."""
        return {name: self[name] for name in self.names}


def _key(name: str) -> str:
    return name.replace(".", "_")  # torch takes no dots in the names of parameters
