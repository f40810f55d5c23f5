"""Neurons brought into an order in which neighbours are alike, so that those of a panel can share a codebook.

The order of a layer's outputs folds into the inputs of the layer behind it, so nothing has to be stored (JLCM, arXiv
2309.17361). Exact are the neurons of an MLP or an expert, the rows of gate and up with the columns of down; and within
a head of more than 64 values the rows of v with the columns of o. Sums take another order then, and round otherwise.
Outputs of o and down stay: the residual stream has one order for all layers. So do queries and keys, whose places
rotary embeddings tell apart.

Neurons are alike if their weights are distributed alike: by the quantiles of a row over its norm. They are sorted
along the direction in which these differ most, their first principal component.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from phasewise.model.codebook import PANEL
from phasewise.model.config import ModelConfig

QUANTILES = 15


@dataclass(frozen=True)
class NeuronOrder:
    """Which old outputs, or inputs, of a linear layer its new ones are, int64 [n], by the layer's name. One that has no
    name here stays as it is."""

    rows: Mapping[str, Tensor]
    columns: Mapping[str, Tensor]

    def weight(self, name: str, weight: Tensor) -> Tensor:
        """A weight [out, in] in this order."""
        if name in self.rows:
            weight = weight[self.rows[name]]
        return weight[:, self.columns[name]] if name in self.columns else weight

    def hessian(self, name: str, hessian: Tensor) -> Tensor:
        """X^T X [in, in] of a layer's inputs in this order."""
        if name not in self.columns:
            return hessian
        return hessian[self.columns[name]][:, self.columns[name]].contiguous()

    def bias(self, name: str, bias: Tensor) -> Tensor:
        """A bias [out] in this order."""
        return bias[self.rows[name]] if name in self.rows else bias


AS_IT_WAS = NeuronOrder({}, {})


def alike(weights: list[Tensor]) -> Tensor:
    """The order int64 [n] in which neighbours are alike, for neurons with rows in each of these, float32 [n, in]."""
    ranks = (torch.arange(QUANTILES) + 0.5) / QUANTILES
    shapes = [torch.quantile(w / w.norm(dim=1, keepdim=True).clamp_min(1e-30), ranks, dim=1).T for w in weights]
    features = torch.cat(shapes, 1)
    features = features - features.mean(0)
    direction = torch.linalg.eigh(features.T @ features).eigenvectors[:, -1]
    found: Tensor = (features @ (direction * direction.sum().sign())).argsort(stable=True)
    return found


def of_layer(config: ModelConfig, weights: Mapping[str, Tensor]) -> NeuronOrder:
    """The order of a layer whose linear layers have these weights, by the last part of their names in `layout`."""
    rows, columns = dict[str, Tensor](), dict[str, Tensor]()
    for name, weight in weights.items():
        if name.endswith("gate_up"):
            half = len(weight) // 2
            order = alike([weight[:half], weight[half:]])
            rows[name] = torch.cat((order, order + half))
            columns[name.removesuffix("gate_up") + "down"] = order
    size = config.head_dim
    if size > PANEL:
        first = (config.heads + config.kv_heads) * size  # of v among the outputs of qkv
        values = torch.split(weights["qkv"][first:], size)
        heads = [alike([each]) for each in values]
        own = [order + i * size for i, order in enumerate(heads)]
        rows["qkv"] = torch.cat((torch.arange(first), *(order + first for order in own)))
        shared = config.heads // config.kv_heads  # query heads that read a head of values
        columns["o"] = torch.cat([heads[i // shared] + i * size for i in range(config.heads)])
    return NeuronOrder(rows, columns)
