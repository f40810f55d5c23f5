"""Which models the native kernels run as a whole: the plain decoder, in bfloat16 (or int8) on a CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from phasewise.model.config import ModelConfig
from phasewise.model.mlp import MLP
from phasewise.model.norm import HeadNorm
from phasewise.ops.native.fit import MOST_DIM
from phasewise.ops.native.stack import Stack, StackLayer, StackShape
from phasewise.ops.native.weights import Packed

if TYPE_CHECKING:
    from phasewise.model.model import Layer


def stacked(
    layers: Sequence[Layer], config: ModelConfig, dtype: torch.dtype, table: Packed | Tensor, scale: float
) -> Stack | None:
    """Embeddings (`table` [V, d], taken `scale` times) and layers as one native call, or None when one of them is more
    than the plain decoder layer."""
    if dtype != torch.bfloat16 or config.head_dim > MOST_DIM or not layers:
        return None
    made = [_stacked(layer, config) for layer in layers]
    plain = [layer for layer in made if layer is not None]
    if len(plain) < len(made):
        return None
    widths = {layer.products[3].inputs for layer in plain}
    if len(widths) > 1:
        return None
    shape = StackShape(plain[0].products[0].inputs, config.heads, config.kv_heads, config.head_dim, widths.pop())
    return Stack(plain, shape, table, scale)


def _stacked(layer: Layer, config: ModelConfig) -> StackLayer | None:
    mlp, spec = layer.mlp, config.attention[layer.index]
    if not isinstance(mlp, MLP) or mlp.activate is not F.silu or spec.softcap is not None:
        return None
    if layer.before_attention is None or layer.before_mlp is None:
        return None
    if layer.after_attention is not None or layer.after_mlp is not None:
        return None
    if layer.qk_norm is not None and not isinstance(layer.qk_norm, HeadNorm):
        return None
    qkv, o, gate_up, down = (linear.native for linear in (layer.qkv, layer.o, mlp.gate_up, mlp.down))
    if qkv is None or o is None or gate_up is None or down is None:
        return None
    if len({product.int8 for product in (qkv, o, gate_up, down)}) > 1:
        return None
    heads = layer.qk_norm
    return StackLayer(
        products=(qkv, o, gate_up, down),
        before_attention=layer.before_attention.weight,
        before_mlp=layer.before_mlp.weight,
        heads_norm=None if heads is None else heads.weight,
        eps=(layer.before_attention.eps, layer.before_mlp.eps, 0.0 if heads is None else heads.eps),
        turn=layer.rope,
        window=spec.window,
        scale=spec.scale,
    )
