"""The gated MLP, and the mixture of experts made of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from phasewise.model.config import ClampedGate
from phasewise.ops.linear import Linear

Activation = Callable[[Tensor], Tensor]
ACTIVATION: dict[str, Activation] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}


Beside = Callable[[str, Tensor, Tensor], None]
"""(linear, x, y): adds to y what low-rank weights make of the input x of a linear layer."""


class LayerCounts(Protocol):
    """Counters that a layer reports to."""

    def count(self, counter: str, n: int) -> None: ...


def clamped(gate: Tensor, up: Tensor, how: ClampedGate) -> Tensor:
    """What `ClampedGate` says of gate and up [T, I] -> [T, I]."""
    gate = gate.clamp(max=how.limit)
    return (up.clamp(-how.limit, how.limit) + 1).mul_(gate * torch.sigmoid(how.alpha * gate))


class MLP:
    """down(act(gate x) * up x) for x [T, d], or what `clamp` says of gate and up; both are one matrix [2I, d]."""

    def __init__(self, gate_up: Linear, down: Linear, activation: str, clamp: ClampedGate | None = None) -> None:
        self.gate_up = gate_up
        self.down = down
        self.activate = ACTIVATION[activation]
        self.clamp = clamp

    def __call__(
        self, x: Tensor, counts: LayerCounts, add: Tensor | None = None, beside: Beside | None = None
    ) -> Tensor:
        """`add` [T, d] is the residual, summed in by the last kernel."""
        both = self.gate_up(x)
        if beside is not None:
            beside("gate_up", x, both)
        gate, up = both.chunk(2, -1)  # [T, I] each
        inner = self.activate(gate).mul_(up) if self.clamp is None else clamped(gate, up, self.clamp)
        out = self.down(inner, add)
        if beside is not None:
            beside("down", inner, out)
        return out


@dataclass(frozen=True, eq=False)
class MoE:
    """`top_k` of the experts per row, mixed by the router's softmax; a row's result depends on that row alone."""

    router: Linear
    experts: tuple[MLP, ...]
    top_k: int
    renormalise: bool

    def __call__(
        self, x: Tensor, counts: LayerCounts, add: Tensor | None = None, beside: Beside | None = None
    ) -> Tensor:
        """Counts `expert_loads`: the distinct experts whose weights this call read. Nothing lies beside experts."""
        weights, chosen = self.route(x)  # [T, k] float32, [T, k]
        order = chosen.flatten().argsort(stable=True)  # (row, choice) pairs, grouped by expert
        loads = torch.bincount(chosen.flatten(), minlength=len(self.experts)).tolist()
        grouped = x[order // self.top_k]  # [T * k, d]
        mixed = torch.empty_like(grouped)
        start = 0
        for expert, rows in zip(self.experts, loads):
            if rows:
                mixed[order[start : start + rows]] = expert(grouped[start : start + rows], counts)
                start += rows
        counts.count("expert_loads", sum(map(bool, loads)))
        scaled = mixed.view(*chosen.shape, x.shape[-1]).float().mul_(weights[..., None])  # [T, k, d]
        y = scaled.sum(1).to(x.dtype)
        return y if add is None else y.add_(add)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Weights (float32) and experts of each row, [T, k] each: softmax over all experts, then the top k, of equal
        ones the first."""
        chances, order = self.router(x).float().softmax(-1).sort(stable=True, descending=True)
        weights, chosen = chances[:, : self.top_k], order[:, : self.top_k]
        if self.renormalise:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights, chosen
