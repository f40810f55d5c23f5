"""The decoder block that feature drafters consist of, as torch modules: the trainer trains them, the drafter runs them.

Parameters are named as in published checkpoints. Attention is left to the caller, who knows which rows see which.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, TypeVar

import torch
from torch import Tensor, nn

from phasewise.model.config import ModelConfig
from phasewise.model.mlp import ACTIVATION
from phasewise.model.norm import rms_norm
from phasewise.ops.linear import Linear

UNLIKELY = -1e4  # the logit of tokens outside a draft vocabulary; finite, as constraints may leave no others
AttendRows = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Queries [..., Hq, D], keys and values [..., H, D] of rows, not rotated yet -> what the rows read, [..., Hq, D]."""


class BlockNorm(nn.Module):
    """RMSNorm over the last dimension, in float32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class BlockAttention(nn.Module):
    """Projections of a block's attention; queries, keys and values read rows of `inputs` numbers."""

    def __init__(self, config: ModelConfig, inputs: int) -> None:
        super().__init__()
        q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
        self.dim = config.head_dim
        self.q_proj = nn.Linear(inputs, q, bias=config.qkv_bias)
        self.k_proj = nn.Linear(inputs, kv, bias=config.qkv_bias)
        self.v_proj = nn.Linear(inputs, kv, bias=config.qkv_bias)
        self.o_proj = nn.Linear(q, config.hidden, bias=config.o_bias)
        self.q_norm = BlockNorm(config.head_dim, config.eps) if config.qk_norm == "head" else None
        self.k_norm = BlockNorm(config.head_dim, config.eps) if config.qk_norm == "head" else None

    def keys_values(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Keys, not rotated yet, and values [..., H, D] of rows x [..., inputs]."""
        k, v = (each(x).unflatten(-1, (-1, self.dim)) for each in (self.k_proj, self.v_proj))
        return (k if self.k_norm is None else self.k_norm(k)), v

    def forward(self, x: Tensor, attend: AttendRows) -> Tensor:
        q = self.q_proj(x).unflatten(-1, (-1, self.dim))
        k, v = self.keys_values(x)
        if self.q_norm is not None:
            q = self.q_norm(q)
        read: Tensor = self.o_proj(attend(q, k, v).flatten(-2))
        return read


class GatedMLP(nn.Module):
    """down(act(gate x) * up x), of `outputs` numbers; 0: as many as x has."""

    def __init__(self, config: ModelConfig, outputs: int = 0) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden, config.intermediate, bias=config.mlp_bias)
        self.up_proj = nn.Linear(config.hidden, config.intermediate, bias=config.mlp_bias)
        self.down_proj = nn.Linear(config.intermediate, outputs or config.hidden, bias=config.mlp_bias)
        self.activate = ACTIVATION[config.activation]

    def forward(self, x: Tensor, gating: Tensor | None = None) -> Tensor:
        """`gating` [..., d]: the rows that the gate reads in place of x."""
        gate = self.activate(self.gate_proj(x if gating is None else gating))
        out: Tensor = self.down_proj(gate * self.up_proj(x))
        return out


class Block(nn.Module):
    """Attention over rows of `inputs` numbers, then an MLP, each added to the residual [..., d]."""

    def __init__(self, config: ModelConfig, inputs: int) -> None:
        super().__init__()
        self.self_attn = BlockAttention(config, inputs)
        self.mlp = GatedMLP(config)
        self.post_attention_layernorm = BlockNorm(config.hidden, config.eps)

    def run(self, x: Tensor, residual: Tensor, attend: AttendRows) -> Tensor:
        """Rows [..., d] of the block for inputs x [..., inputs]."""
        residual = residual + self.self_attn(x, attend)
        out: Tensor = residual + self.mlp(self.post_attention_layernorm(residual))
        return out


class NormedBlock(Block):
    """A decoder layer as models have it: attention reads its rows after a norm, [..., d] -> [..., d]."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config, config.hidden)
        self.input_layernorm = BlockNorm(config.hidden, config.eps)

    def forward(self, x: Tensor, attend: AttendRows) -> Tensor:
        return self.run(self.input_layernorm(x), x, attend)


class FeatureHeads(nn.Module):
    """Heads that foretell tokens from features of the target model and the tokens between.

    One token after another, each reading the one before; or up to `parallel` of them in one pass, in which the rows of
    tokens not yet guessed are those of the token `mask`. With `features_cached` features are no part of rows: every
    layer reads them as keys and values.

    `taps`: the states a feature is made of, by layer as published: i is the residual stream that enters layer i, and
    the number of layers is what leaves the last one. None: the target's last state, after its final norm.
    `feature_width`: of a kept feature. `embed_tokens`, `lm_head` and `d2t` are None where the target's own serve.
    """

    kind: ClassVar[str]
    taps: tuple[int, ...] = ()
    feature_width: int
    row_width: int  # of a row that enters the first layer
    parallel: int = 0  # the most guesses in a pass with masks; 0: one guess a pass, and no masks
    mask: int
    features_cached: ClassVar[bool] = False
    steps: int = 5  # guesses in a row that they were trained for
    d2t: Tensor | None  # int64 [draft vocabulary]: what is added to a draft token's number to get the target's

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config, self.feature_width, self.row_width = config, config.hidden, 2 * config.hidden
        self.embed_tokens: nn.Module | None = None
        self.lm_head: nn.Module | None = None
        self.register_buffer("d2t", None)

    @property
    def block(self) -> Block:
        """The one block that they have."""
        raise NotImplementedError

    def forward(self, embedded: Tensor, feature: Tensor, attend: AttendRows) -> Tensor:
        """Pairs of embeddings and features [..., d] each -> outputs [..., d] of the first layer."""
        raise NotImplementedError

    def inputs(self, embedded: Tensor, feature: Tensor) -> Tensor:
        """The rows [..., row_width] that embeddings [..., d], and the features [..., d] of the tokens before, enter
        as."""
        return torch.cat((embedded, feature), -1)

    def layer(self, i: int, x: Tensor, attend: AttendRows) -> Tensor:
        """Rows x after layer i, [..., d]."""
        embedded, feature = x.chunk(2, -1)
        out: Tensor = self(embedded, feature, attend)
        return out

    def fuse(self, states: Tensor) -> Tensor:
        """The feature [..., d] of the states of all taps, [..., taps * target's d]."""
        return states

    def masked_feature(self) -> Tensor:
        """The feature [d] of a mask. Asked of heads whose rows hold features."""
        raise NotImplementedError

    def keys_values(self, i: int, feature: Tensor) -> tuple[Tensor, Tensor]:
        """Keys, not rotated yet, and values [..., H, D] of layer i for features [..., d]. Asked where features are
        cached."""
        raise NotImplementedError

    def passed_on(self, output: Tensor) -> Tensor:
        """The feature that an output stands for, one token further on: [..., d] -> [..., d]."""
        return output

    def final(self, output: Tensor) -> Tensor:
        """The input [..., d] of the output head."""
        return output

    def logits(self, output: Tensor, unembed: Callable[[Tensor], Tensor]) -> Tensor:
        """Outputs [n, d] of the block -> logits [n, V] float32, over the target's vocabulary. `unembed`: the target's
        own head."""
        if self.lm_head is None:
            return unembed(self.final(output)).float()
        own: Tensor = self.lm_head(self.final(output)).float()
        if self.d2t is None:
            return own
        return own.new_full((len(own), self.config.vocab), UNLIKELY).index_copy(1, self.draft_ids(), own)

    def draft_ids(self) -> Tensor:
        """Target ids of the draft vocabulary, int64."""
        assert self.d2t is not None
        return torch.arange(len(self.d2t), device=self.d2t.device) + self.d2t


class LayeredHeads(FeatureHeads):
    """Heads of whole layers, as models have them, and a norm before the output head. Rows are features [..., d]."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.row_width = config.hidden
        self.layers = nn.ModuleList(self.made(config) for _ in range(config.layers))
        self.norm = BlockNorm(config.hidden, config.eps)

    def made(self, config: ModelConfig) -> nn.Module:
        """One of its layers."""
        return NormedBlock(config)

    def inputs(self, embedded: Tensor, feature: Tensor) -> Tensor:
        return feature

    def layer(self, i: int, x: Tensor, attend: AttendRows) -> Tensor:
        out: Tensor = self.layers[i](x, attend)
        return out

    def final(self, output: Tensor) -> Tensor:
        normed: Tensor = self.norm(output)
        return normed


class PackedLinear(nn.Module):
    """A linear layer in the engine's own form, which reads memory faster."""

    def __init__(self, linear: Linear) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.reshape(-1, x.shape[-1]))


H = TypeVar("H", bound=nn.Module)


def packed(heads: H) -> H:
    """The same heads, with linear layers packed where the engine packs its own (`ops/linear.py`): in 16 bits on a
    CPU."""
    for module in [*heads.modules()]:
        for name, child in [*module.named_children()]:
            if isinstance(child, nn.Linear) and child.weight.dtype == torch.bfloat16 and not child.weight.is_cuda:
                bias = None if child.bias is None else child.bias.data
                setattr(module, name, PackedLinear(Linear(child.weight.data, bias)))
    return heads
