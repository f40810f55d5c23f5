"""Muon (orthogonalised momentum, arXiv 2502.16982) as torch has it, with matrices of one shape taken together.

torch's step multiplies in bfloat16, matrix by matrix: in this repository's small models that was a fifth of a step, and
a processor without bfloat16 units takes twice as long for it as for float32.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class Muon(torch.optim.Muon):
    """torch's Muon, its options and its state, with Newton-Schulz over stacks in `precision`."""

    def __init__(self, params: Any, precision: torch.dtype, **options: Any) -> None:
        super().__init__(params, **options)
        self.precision = precision

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One step from the gradients that are there. `closure` is refused: nothing here evaluates a loss twice."""
        assert closure is None
        for group in self.param_groups:
            alike: dict[torch.Size, list[Tensor]] = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    alike[parameter.shape].append(parameter)
            for shape, parameters in alike.items():
                wanted = torch.stack([self._momentum(parameter, group) for parameter in parameters])
                ways = orthogonal(wanted.to(self.precision), group["ns_coefficients"], group["ns_steps"], group["eps"])
                rate = group["lr"] * math.sqrt(max(1.0, shape[0] / shape[1]))
                for parameter, way in zip(parameters, ways, strict=True):
                    parameter.mul_(1 - group["lr"] * group["weight_decay"]).add_(way, alpha=-rate)

    def _momentum(self, parameter: Tensor, group: dict[str, Any]) -> Tensor:
        """The matrix's update before it is made orthogonal (Nesterov's look ahead)."""
        grad = parameter.grad
        assert grad is not None
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(grad)
        mean: Tensor = state["momentum_buffer"]
        mean.lerp_(grad, 1 - group["momentum"])
        return grad.lerp(mean, group["momentum"]) if group["nesterov"] else mean


def orthogonal(x: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """Matrices [n, rows, columns] with all singular values near 1 and their directions kept, by Newton-Schulz."""
    a, b, c = coefficients
    tall = x.shape[1] > x.shape[2]
    x = x.mT if tall else x
    x = x / x.flatten(1).norm(dim=1).clamp(min=eps)[:, None, None]
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x
