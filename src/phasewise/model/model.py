"""The decoder: ragged rows in, logits out. It knows neither requests nor caches; `ctx.attend` does."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from phasewise.model.config import ModelConfig
from phasewise.model.layout import layout
from phasewise.model.lowrank import Deltas
from phasewise.model.mlp import MLP, LayerCounts, MoE
from phasewise.model.norm import FullNorm, HeadNorm, RMSNorm
from phasewise.model.parse import parse_config
from phasewise.model.rope import RopeTables, Rotary
from phasewise.model.rounded import RoundedTensors
from phasewise.model.source import Source, source
from phasewise.model.stacked import stacked
from phasewise.model.weights import Weights
from phasewise.model.weights_form import WeightsForm
from phasewise.ops.linear import Linear
from phasewise.ops.native.head import Head
from phasewise.ops.native.stack import Stack, Turns
from phasewise.ops.sampling import allowed


class LayerContext(LayerCounts, Protocol):
    """The interface of a layer to the step it runs in."""

    rotary: Rotary  # from Model.rotary, for exactly the rows of this call

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Stores k and v [T, Hkv, D] (k already rotated), and returns what q [T, Hq, D] reads, [T, Hq, D].

        All three may be strided views of one buffer that is not used again.
        """
        ...


class Layer:
    """One decoder layer: attention and MLP, each with its norms and residual. Rows never see each other outside
    `ctx.attend`, so any subset of rows may be given."""

    def __init__(self, index: int, config: ModelConfig, weights: Weights) -> None:
        self.index = index
        self.heads, self.kv_heads, self.head_dim = config.heads, config.kv_heads, config.head_dim
        self.rope = config.rope_of[index]
        self.before_attention = _norm(f"{index}.before_attention", config, weights)
        self.after_attention = _norm(f"{index}.after_attention", config, weights)
        self.before_mlp = _norm(f"{index}.before_mlp", config, weights)
        self.after_mlp = _norm(f"{index}.after_mlp", config, weights)
        self.qk_norm = _qk_norm(index, config, weights)
        self.qkv = weights.linear(f"{index}.qkv")
        self.o = weights.linear(f"{index}.o")
        key = f"{index}.sink_scores"
        self.sink_scores = weights.take(key).float() if key in weights else None  # [Hq]
        self.mlp = _mlp(index, config, weights)

    def __call__(self, x: Tensor, ctx: LayerContext, deltas: Deltas | None = None) -> Tensor:
        return self.feed(self.mix(x, ctx, deltas), ctx, deltas)

    def mix(self, x: Tensor, ctx: LayerContext, deltas: Deltas | None = None, *, bare: bool = False) -> Tensor:
        """The attention half, x [T, d] -> [T, d]; `bare`: what it adds to x alone."""
        q, k, v = self.project(x, ctx.rotary, deltas)
        out = ctx.attend(self.index, q, k, v).reshape(x.shape[0], self.heads * self.head_dim)  # [T, Hq * D]
        mixed = self.o(out, x if self.after_attention is None and not bare else None)
        if deltas is not None:
            deltas.add(self.index, "o", out, mixed)
        if self.after_attention is None:
            return mixed
        mixed = self.after_attention(mixed)
        return mixed if bare else mixed.add_(x)

    def project(self, x: Tensor, rotary: Rotary, deltas: Deltas | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [T, Hq, D], keys and values [T, Hkv, D] of rows x [T, d]; queries and keys are rotated."""
        h = x if self.before_attention is None else self.before_attention(x)
        turned = self.heads + self.kv_heads
        qkv = self.qkv(h)
        if deltas is not None:
            deltas.add(self.index, "qkv", h, qkv)
        qkv = qkv.view(x.shape[0], turned + self.kv_heads, self.head_dim)
        qk, v = qkv.split_with_sizes((turned, self.kv_heads), 1)  # [T, Hq + Hkv, D], [T, Hkv, D]
        if self.qk_norm is not None:
            qk = self.qk_norm(qk)
        if self.rope is not None:
            qk = rotary(self.rope, qk)
        q, k = qk.split_with_sizes((self.heads, self.kv_heads), 1)
        return q, k, v

    def feed(self, x: Tensor, ctx: LayerContext, deltas: Deltas | None = None) -> Tensor:
        """The MLP half, x [T, d] -> [T, d]."""
        h = x if self.before_mlp is None else self.before_mlp(x)
        beside = None if deltas is None else partial(deltas.add, self.index)
        if self.after_mlp is None:
            return self.mlp(h, ctx, x, beside)
        return self.after_mlp(self.mlp(h, ctx, None, beside)).add_(x)


class Model:
    """A decoder of one of the supported families. Plain tensors, no autograd: run it under `torch.inference_mode`.

    Inputs are never changed in place; every result is a fresh tensor.
    """

    def __init__(self, config: ModelConfig, weights: Weights, files: Source, form: WeightsForm | None = None) -> None:
        self.config, self.dtype, self.device = config, weights.dtype, weights.device
        self.int8 = weights.int8  # linear layers have rounded weights
        self.form = form  # that weights were rounded into when they were loaded
        self.files = files  # what was trained for the model may lie with them
        table = weights.table("embed")  # [V, d]
        self.layers = tuple(Layer(i, config, weights) for i in range(config.layers))
        self.norm = RMSNorm(_offset(weights.take("norm"), config), config.eps)
        self.unembed = _tied(table, weights) if config.tied else weights.linear("head")
        # a tied table that the native kernels have packed need not be kept twice
        self.table = None if config.tied and self.unembed.native is not None else table
        self._ropes = RopeTables(config.ropes, config.max_positions, self.dtype, self.device)
        packed, half = self.unembed.native, self.dtype == torch.bfloat16
        # final norm, `unembed` and softcap in one native call, if the kernels have the weights
        cap = config.logit_softcap
        self.whole_head = Head(packed, self.norm.weight, config.eps, cap) if packed is not None and half else None
        # in the model's dtype first, as the families were trained
        self._scale = float(torch.tensor(config.embed_scale, dtype=self.dtype))
        # embeddings and all layers in one native call, if the kernels have all weights
        self.stack = self._stacked(range(config.layers))
        self._walks: dict[tuple[int, ...], Stack | None] = {}
        self.weight_bytes = weights.taken_bytes  # of all parameters, tied embeddings once
        # of zeros, since NaN and infinity times zero are NaN
        zeros = torch.zeros((1, config.hidden), dtype=self.dtype, device=self.device)
        on_paper = self.device.type == "meta"  # where nothing has a value
        # whether the final norm and the output head have finite weights alone
        self.head_finite = on_paper or bool(torch.isfinite(self._logits(zeros)).all())

    @classmethod
    def load(cls, path: str | Path, *, dtype: torch.dtype | None = None, device: torch.device | str = "cpu",
             context: int | None = None, form: WeightsForm | None = None) -> Model:  # fmt: skip
        """The model in a directory or a .gguf file, or of a hub id. `dtype` None keeps the checkpoint's.

        `dtype` int8 rounds the weights of linear layers (and embeddings, when tied) and computes in bfloat16 otherwise.

        `form` rounds the matrices of all layers to their nearest levels; on a CPU they stay levels.

        `context` is the longest sequence to serve; None takes the checkpoint's own. Where rotary frequencies depend
        on it (longrope, dynamic), the default is the length up to which they are the trained ones.
        Raises UserError, UnsupportedModel or WeightsError, each naming the file and the fix.
        """
        files = source(path)
        config = parse_config(files.settings(), context)
        tensors = files.tensors()
        if form is not None:
            tensors = RoundedTensors(tensors, config, form)
        return cls(config, Weights(tensors, layout(config), dtype, torch.device(device)), files, form)

    def embed(self, tokens: Tensor) -> Tensor:
        """int64 [T] -> [T, d] in the model's dtype."""
        table = self.unembed if self.table is None else self.table
        x = table.rows(tokens) if isinstance(table, Linear) else F.embedding(tokens, table)
        return x if self._scale == 1.0 else x.mul_(self._scale)

    def rotary(self, positions: Tensor, end: int | None = None) -> Rotary:
        """int64 [T], all below `end` -> cos and sin of each row for every kind of rotation, once per step."""
        return self._ropes(positions, end)

    def turns(self, end: int) -> Turns:
        """The same for all positions below `end`, as `stack` takes them."""
        return self._ropes.turns(end)

    def turns_at(self, positions: Sequence[int]) -> Turns:
        """The same for these positions alone, one place each, however large they are."""
        return self._ropes.turns_at(positions)

    @property
    def turned(self) -> int:
        """Positions below this one are kept in tables once they have been met; later ones are worked out step
        by step."""
        return self._ropes.most

    @property
    def depth(self) -> int:
        """The number of attentions of a pass that have to wait for one another."""
        return self.config.layers

    def stack_of(self, walk: tuple[int, ...] | None) -> Stack | None:
        """The native call for some layers, increasing; None: for all of them."""
        if walk is None or self.stack is None:
            return self.stack
        if walk not in self._walks:
            self._walks[walk] = self._stacked(walk)
        return self._walks[walk]

    def _stacked(self, walk: Sequence[int]) -> Stack | None:
        table = self.unembed if self.table is None else self.table
        embeddings = table.native if isinstance(table, Linear) else table
        if embeddings is None:
            return None
        return stacked([self.layers[i] for i in walk], self.config, self.dtype, embeddings, self._scale)

    def layer(self, i: int, x: Tensor, ctx: LayerContext, deltas: Deltas | None = None) -> Tensor:
        """The whole of layer `i` with norms and residuals, [T, d] -> [T, d]; `deltas`: low-rank weights of rows."""
        return self.layers[i](x, ctx, deltas)

    def sink_scores(self, layer: int) -> Tensor | None:
        """The scores of a layer's query heads for which there is no row, float32 [Hq]; None where there are none."""
        return self.layers[layer].sink_scores if self.config.sink_scores else None

    def head(self, x: Tensor) -> Tensor:
        """[R, d] -> logits [R, V] in float32, final norm and softcap included."""
        return self._logits(x)

    def _logits(self, x: Tensor) -> Tensor:
        if self.whole_head is not None:
            return self.whole_head.logits(x)
        logits, cap = self.unembed(self.norm(x)).float(), self.config.logit_softcap
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)

    def best(self, x: Tensor, masks: Sequence[Tensor | None] = ()) -> list[int]:
        """[R, d] -> [R], the most likely token per row: `head(x).argmax(-1)`, but logits need not be written.

        `masks`: none, or one per row of the tokens that count (`sampling.barred`); -1 where that leaves none.
        """
        return allowed(self.head(x), masks) if self.whole_head is None else self.whole_head.best(x, masks)

    def rotate(self, layer: int, k: Tensor, delta: int | Tensor) -> Tensor:
        """Cached keys of one layer [..., D] moved by `delta` positions (int, or a tensor broadcasting over the
        leading dimensions), in float32 and back; unchanged on a layer without rotary positions."""
        kind = self.config.rope_of[layer]
        return k if kind is None else self._ropes.shift(kind, k, delta)

    def turning(self, layer: int, delta: Tensor) -> Tensor | None:
        """The rotation of `rotate` as tables: cos and signed sin of each of `delta` int64 [n],
        float32 [n, 2, R]; None on a layer without rotary positions."""
        kind = self.config.rope_of[layer]
        return None if kind is None else torch.stack(self._ropes.angles(kind, delta), -2)


def _offset(weight: Tensor, config: ModelConfig) -> Tensor:
    return weight if config.norm_offset == 0.0 else weight.float() + config.norm_offset


def _tied(table: Tensor | Linear, weights: Weights) -> Linear:
    """The head of a model that ties it to its embeddings."""
    return table if isinstance(table, Linear) else weights.packed(table)


def _norm(key: str, config: ModelConfig, weights: Weights) -> RMSNorm | None:
    return RMSNorm(_offset(weights.take(key), config), config.eps) if key in weights else None


def _qk_norm(index: int, config: ModelConfig, weights: Weights) -> HeadNorm | FullNorm | None:
    if config.qk_norm is None:
        return None
    q = _offset(weights.take(f"{index}.q_norm"), config)
    k = _offset(weights.take(f"{index}.k_norm"), config)
    if config.qk_norm == "full":
        return FullNorm(q, k, config.eps)
    return HeadNorm(torch.cat((q.expand(config.heads, -1), k.expand(config.kv_heads, -1))), config.eps)


def _mlp(index: int, config: ModelConfig, weights: Weights) -> MLP | MoE:
    def mlp(key: str) -> MLP:
        gate_up, down = weights.linear(f"{key}.gate_up"), weights.linear(f"{key}.down")
        return MLP(gate_up, down, config.activation, config.clamped)

    spec = config.moe[index]
    if spec is None:
        return mlp(str(index))
    router = weights.linear(f"{index}.router")
    experts = tuple(mlp(f"{index}.expert.{e}") for e in range(spec.experts))
    return MoE(router, experts, spec.top_k, spec.renormalise)
