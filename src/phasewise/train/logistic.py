"""Logistic regression on standardised features, its strength of regularisation and its threshold chosen on other
examples."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

STRENGTHS = (1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0)  # C: the weight of the data over the penalty
STEPS, HALVES = 50, 20
CLOSE = 1e-12  # a loss that falls by a smaller share has been reached


@dataclass(frozen=True)
class LinearScore:
    """score = weight x + bias, of features as they are; float64."""

    weight: Tensor  # [d]
    bias: float

    def __call__(self, features: Tensor) -> Tensor:
        """[n, d] -> [n]."""
        return features.double() @ self.weight + self.bias


@dataclass(frozen=True)
class ChosenScore:
    """The score with the best area under the curve on validation examples, by its C."""

    score: LinearScore
    strength: float
    areas: dict[float, float]  # by C


def fitted(features: Tensor, good: Tensor, strength: float) -> LinearScore:
    """The minimum of |w|^2 / 2 + C times the sum of the losses, w being that of standardised features [n, d]; `good`
    bool [n]. By Newton's method, whose steps are halved while they do not help."""
    x, y = features.double(), good.double()
    mean, scale = x.mean(0), x.std(0, unbiased=False).clamp(min=1e-12)
    x = torch.cat(((x - mean) / scale, torch.ones(len(x), 1, dtype=torch.float64)), 1)
    penalty = torch.ones(x.shape[1], dtype=torch.float64)
    penalty[-1] = 1e-9  # the bias is free, and yet one of a single class has an end

    def loss(w: Tensor) -> float:
        data = F.binary_cross_entropy_with_logits(x @ w, y, reduction="sum")
        return float(strength * data + (penalty * w.square()).sum() / 2)

    w, here = torch.zeros(x.shape[1], dtype=torch.float64), math.inf
    for _ in range(STEPS):
        chances = (x @ w).sigmoid()
        slope = strength * x.T @ (chances - y) + penalty * w
        bend = strength * (x.T * (chances * (1 - chances))) @ x + penalty.diag()
        step, before = torch.linalg.solve(bend, slope), loss(w)
        size = next((2.0**-n for n in range(HALVES) if loss(w - step * 2.0**-n) < before), 0.0)
        w, here = w - size * step, loss(w - size * step)
        if before - here <= CLOSE * abs(before):
            break
    weight = w[:-1] / scale
    return LinearScore(weight, float(w[-1] - weight @ mean))


def area(scores: Tensor, good: Tensor) -> float:
    """The share of pairs of a good and another example in which the good one has the higher score; ties count half."""
    of, other = scores[good][:, None], scores[~good][None]
    return float((of > other).double().mean() + (of == other).double().mean() / 2)


def chosen(
    learn: tuple[Tensor, Tensor], judge: tuple[Tensor, Tensor], strengths: Sequence[float] = STRENGTHS
) -> ChosenScore:
    """Features [n, d] and labels bool [n] to learn from, and to choose by. Of equal areas the smaller C."""
    scores = {strength: fitted(*learn, strength) for strength in strengths}
    areas = {strength: area(score(judge[0]), judge[1]) for strength, score in scores.items()}
    best = max(sorted(areas), key=lambda strength: areas[strength])
    return ChosenScore(scores[best], best, areas)


def border(scores: Tensor, good: Tensor, recall: float) -> float:
    """The least score up to which so large a share of examples that are not good lies, half-way to the next higher
    score: what is not above it is refused."""
    bad = scores[~good].sort().values
    at = float(bad[min(len(bad), max(1, -int(-recall * len(bad) // 1))) - 1])
    above = scores[scores > at]
    return (at + float(above.min())) / 2 if len(above) else at
