"""The fuser of C2C: what is added to a layer's keys or values, from those of two models. Serving and training share it.

All heads of a row lie together. Both models' rows are taken down to the fuser's width, and a block of norm, SwiGLU and
residual follows; from there one branch makes the content, and another how much of it each head takes.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

SIDES = ("k", "v")
EPS = 1e-6


def layer_map(layers: int, sharers: int) -> list[int]:
    """Which of the sharer's layers goes with each layer: the last with the last, and backwards from there."""
    return [max(0, i - layers + sharers) for i in range(layers)]


def shapes(layers: int, heads: int, sizes: tuple[int, int], width: int) -> dict[str, tuple[int, ...]]:
    """`sizes`: numbers of a row in the receiver's cache and in the sharer's, all heads together."""
    own, other = sizes
    block = {"norm": (layers, width), "up": (layers, 2 * width, width), "down": (layers, width, width)}
    made = {"in": (layers, width, own + other), "in.bias": (layers, width)}
    made |= {f"{part}.{name}": shape for part in ("trunk", "content", "share") for name, shape in block.items()}
    made |= {"out": (layers, own, width), "out.bias": (layers, own)}
    made |= {"head": (layers, heads, width), "head.bias": (layers, heads)}
    made |= {"gate": (layers,)}
    return {f"{side}.{name}": shape for side in SIDES for name, shape in made.items()}


def added(weights: Mapping[str, Tensor], side: str, layer: int, own: Tensor, other: Tensor) -> Tensor:
    """The addition to `own` [r, own] where the gate is open, of `other` [r, other] as well."""

    def of(name: str) -> Tensor:
        return weights[f"{side}.{name}"][layer]

    def block(part: str, x: Tensor) -> Tensor:
        gate, up = F.linear(F.rms_norm(x, x.shape[-1:], of(f"{part}.norm"), EPS), of(f"{part}.up")).chunk(2, -1)
        return x + F.linear(F.silu(gate) * up, of(f"{part}.down"))

    trunk = block("trunk", F.linear(torch.cat((other, own), -1), of("in"), of("in.bias")))
    content = F.linear(block("content", trunk), of("out"), of("out.bias"))
    share = F.linear(block("share", trunk), of("head"), of("head.bias")).sigmoid()  # [r, H]
    parts = content.reshape(*share.shape, -1) * share.unsqueeze(-1)
    return parts.reshape(content.shape)
