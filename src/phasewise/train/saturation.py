"""Measures how saturated attention has become, which shows that a run diverges long before its losses do."""

from __future__ import annotations

from typing import cast

import torch

from phasewise.train.dense import DenseDecoder, DenseLayer, TokenBlock, rotate
from phasewise.train.passes import Pass


@torch.no_grad()
def largest_score(model: DenseDecoder, block: TokenBlock) -> float:
    """The largest attention score, |q . k| / sqrt(head_dim), of any layer and head over the rows of a block.

    A run that learns levels off (pocket's second edition near 130, at full rates). One whose scores go on growing ends
    with a softmax that is one row and nothing else: no gradient comes through it any more (arXiv 2507.20534).
    """
    shape, rows, length = model.shape, *block.ids.shape
    taps: dict[int, torch.Tensor] = dict.fromkeys(range(shape.num_hidden_layers), model.embed_tokens.weight)
    model.hidden([block], Pass(taps=taps))
    enters = [model.embed_tokens(block.ids.flatten()), *(taps[i] for i in range(shape.num_hidden_layers - 1))]
    turns, groups = model.rope(block.positions.flatten()), shape.num_attention_heads // shape.num_key_value_heads
    causal, most = torch.ones(length, length, dtype=torch.bool, device=block.ids.device).tril_(), 0.0
    for layer, x in zip(cast("list[DenseLayer]", list(model.layers)), enters, strict=True):
        normed, own = layer.input_layernorm(x), layer.self_attn
        q, k = (
            rotate(linear(normed).view(rows * length, -1, shape.head_dim), turns).view(rows, length, -1, shape.head_dim)
            for linear in (own.q_proj, own.k_proj)
        )
        k = k.repeat_interleave(groups, 2)
        scores = torch.einsum("bihd,bjhd->bhij", q, k).masked_fill_(~causal, 0.0)
        most = max(most, float(scores.abs().max()) * shape.head_dim**-0.5)
    return most
