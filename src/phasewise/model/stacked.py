"""Models as the native kernels run them, as a whole: on a CPU, with activations in bfloat16 and weights in any form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from phasewise.model.config import ModelConfig
from phasewise.model.mlp import MLP, MoE
from phasewise.model.norm import FullNorm
from phasewise.ops.linear import Linear
from phasewise.ops.native.fit import MOST_DIM
from phasewise.ops.native.stack import LowRank, Stack, StackExperts, StackGate, StackLayer, StackNorm, StackShape
from phasewise.ops.native.weights import PackedWeights

if TYPE_CHECKING:
    from phasewise.model.model import Layer


def stacked(
    layers: Sequence[Layer], config: ModelConfig, dtype: torch.dtype, table: PackedWeights | Tensor, scale: float
) -> Stack | None:
    """Embeddings (`table` [V, d], taken `scale` times) and layers as one native call, or None where the kernels do not
    have all weights, or heads are too large for them."""
    if dtype != torch.bfloat16 or config.head_dim > MOST_DIM or not layers:
        return None
    made = [_stacked(layer, config) for layer in layers]
    known = [layer for layer in made if layer is not None]
    if len(known) < len(made):
        return None
    return Stack(known, StackShape(config.hidden, config.heads, config.kv_heads, config.head_dim), table, scale)


def _stacked(layer: Layer, config: ModelConfig) -> StackLayer | None:
    spec, attention = config.attention[layer.index], _bare(layer.qkv, layer.o)
    mlp = _bare(layer.mlp.gate_up, layer.mlp.down) if isinstance(layer.mlp, MLP) else _experts(layer.mlp)
    pairs = [_pair(linear) for linear in (layer.qkv, layer.o)]
    if isinstance(layer.mlp, MLP):
        pairs += [_pair(linear) for linear in (layer.mlp.gate_up, layer.mlp.down)]
    if attention is None or mlp is None or None in pairs:
        return None
    heads, clamp = layer.qk_norm, config.clamped
    return StackLayer(
        attention=attention,
        mlp=mlp,
        beside=[pair or None for pair in pairs],
        norms=[
            None if norm is None else StackNorm(norm.weight, norm.eps)
            for norm in (layer.before_attention, layer.after_attention, layer.before_mlp, layer.after_mlp)
        ],
        heads_norm=None if heads is None else StackNorm(heads.weight, heads.eps),
        whole=isinstance(heads, FullNorm),
        gate=StackGate(config.activation) if clamp is None else StackGate("clamped", clamp.alpha, clamp.limit),
        turn=layer.rope,
        window=spec.window,
        scale=spec.scale,
        softcap=spec.softcap,
        sink_scores=layer.sink_scores,
    )


def _experts(mixture: MoE) -> StackExperts | None:
    products = [_packed(expert.gate_up, expert.down) for expert in mixture.experts]
    known, router = [both for both in products if both is not None], mixture.router.native
    if router is None or len(known) < len(products):
        return None
    return StackExperts(router, known, mixture.top_k, mixture.renormalise)


def _pair(linear: Linear) -> LowRank | tuple[()] | None:
    """What lies beside a layer's weight, as the kernels have it; () where nothing does, None if they have it not."""
    if linear.beside is None:
        return ()
    down, up = linear.beside.down.native, linear.beside.up.native
    return None if down is None or up is None else (down, up)


def _bare(first: Linear, second: Linear) -> tuple[PackedWeights, PackedWeights] | None:
    """Both without what lies beside them, as the kernels have them; None if they have not."""
    one, two = (each if each.beside is None else each.beside.base for each in (first, second))
    return _packed(one, two)


def _packed(first: Linear, second: Linear) -> tuple[PackedWeights, PackedWeights] | None:
    """Both as the kernels have them; None if they have not."""
    one, two = first.native, second.native
    return None if one is None or two is None else (one, two)
