"""Clover's heads as files, in the manner of vLLM's `speculators`. The authors have published no weights of the first
version; the names of tensors are phasewise's own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from phasewise.errors import UserError
from phasewise.model.config import ModelConfig
from phasewise.model.mlp import MLP
from phasewise.model.model import Model
from phasewise.model.norm import HeadNorm
from phasewise.speculation.heads.block import NormedBlock
from phasewise.speculation.heads.clover import CloverHeads
from phasewise.speculation.heads.fitting import filled, on_paper, other_width
from phasewise.speculation.heads.folder import CONFIG, StoredHeads
from phasewise.speculation.heads.layers import plain_layer

GUESSES, HEADS, LAYERS = "num_heads", "decoder_heads", "num_target_layers"  # settings of these heads alone
USUAL, MOST = 4, 16  # guesses in a row, of which the paper has 3; and the most, and layers, that a folder may have


# ---- reading
def clover(stored: StoredHeads, config: ModelConfig, tensors: Mapping[str, Tensor], model: Model) -> CloverHeads:
    """The heads of these tensors, for a model that they must fit. Raises UserError."""
    if config.hidden != model.config.hidden:
        raise other_width(stored, f"hidden_size={config.hidden}", model)
    where, layers = stored.path / CONFIG, stored.number(LAYERS, model.config.layers)
    if layers != model.config.layers:
        raise UserError(f"{stored.path}: these heads are for a model of {layers} layers ({LAYERS}), the one in "
                        f"{model.files.path} has {model.config.layers}: give heads made for this model")  # fmt: skip
    guesses, heads = stored.number(GUESSES), stored.number(HEADS, config.heads)
    for said, number in ((GUESSES, guesses), ("num_hidden_layers", config.layers)):
        if not 0 < number <= MOST:
            raise UserError(f"{where}: {said}={number} must be from 1 to {MOST}")
    if not heads or config.hidden % heads:
        raise UserError(f"{where}: {HEADS}={heads} must divide hidden_size={config.hidden}")
    return filled(on_paper(lambda: CloverHeads(config, layers, guesses, heads)), tensors, stored)


# ---- making
def usual_clover(model: Model, guesses: int = 0) -> CloverHeads:
    """Untrained heads, with an augmenting block of the sizes of the model's last layer where that is a plain one."""
    config = last_layer(model) or plain_layer(model)
    heads = config.heads if config.hidden % config.heads == 0 else 1
    return CloverHeads(config, model.config.layers, guesses or USUAL, heads)


def last_layer(model: Model) -> ModelConfig | None:
    """The architecture of a model's last layer. None where a block of heads cannot be one: mixtures of experts, norms
    in other places, biases, a rotation of its own."""
    its, layer = model.config, model.layers[-1]
    plain = isinstance(layer.mlp, MLP) and its.clamped is None and not its.sink_scores and its.qk_norm != "full"
    plain &= None not in (layer.before_attention, layer.before_mlp) and its.norm_offset == 0.0
    plain &= layer.after_attention is None and layer.after_mlp is None
    plain &= not (its.qkv_bias or its.o_bias or its.mlp_bias) and its.rope_of[-1] == 0 and len(its.ropes) == 1
    attention = its.attention[-1]
    if not plain or attention.window is not None or attention.softcap is not None:
        return None
    return replace(its, family="qwen3" if its.qk_norm else "llama", layers=1, attention=(attention,), moe=(None,),
                   rope_of=(0,), embed_scale=1.0, logit_softcap=None, fused=False)  # fmt: skip


@torch.no_grad()
def begin_as_last_layer(heads: CloverHeads, model: Model) -> bool:
    """Copies the model's last layer into the augmenting blocks. False if `last_layer` is None: then blocks begin by
    passing rows on as they are."""
    if last_layer(model) is None:
        for name, parameter in heads.layers.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.zero_()
        return False
    for block in heads.layers:
        assert isinstance(block, NormedBlock)
        for own, value in zip(*_pairs(block, model), strict=True):
            own.copy_(value.float())
    return True


def _pairs(block: NormedBlock, model: Model) -> tuple[list[Tensor], list[Tensor]]:
    """The parameters of a block, and the values that they have in a model's last layer."""
    layer, its, attention = model.layers[-1], model.config, block.self_attn
    assert isinstance(layer.mlp, MLP) and layer.before_attention is not None and layer.before_mlp is not None
    queries, keys = its.heads * its.head_dim, its.kv_heads * its.head_dim
    q, k, v = layer.qkv.dense().split_with_sizes((queries, keys, keys))
    gate, up = layer.mlp.gate_up.dense().chunk(2)
    ours: list[Tensor] = [each.weight for each in (
        block.input_layernorm, attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj,
        block.post_attention_layernorm, block.mlp.gate_proj, block.mlp.up_proj, block.mlp.down_proj,
    )]  # fmt: skip
    theirs = [layer.before_attention.weight, q, k, v, layer.o.dense(), layer.before_mlp.weight, gate, up,
              layer.mlp.down.dense()]  # fmt: skip
    if isinstance(layer.qk_norm, HeadNorm) and attention.q_norm is not None and attention.k_norm is not None:
        ours += [attention.q_norm.weight, attention.k_norm.weight]
        theirs += [layer.qk_norm.weight[0], layer.qk_norm.weight[its.heads]]
    return ours, theirs


# ---- writing
def clover_settings(heads: CloverHeads) -> dict[str, Any]:
    """The entries of config.json that these heads alone have."""
    return {
        "architectures": ["CloverSpeculator"], GUESSES: heads.guesses, HEADS: heads.decoder.heads,
        LAYERS: heads.taps[0],
    }  # fmt: skip
