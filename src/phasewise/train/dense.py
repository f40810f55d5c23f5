"""A small differentiable Llama decoder over blocks of padded rows, used only for training.

All blocks of a step go through the matrices as one list of tokens; only attention looks at them block by block. Rows
are padded on the right, so plain causal attention is exact for every real token.
Parameter names and config keys follow the Hugging Face Llama layout, so an export loads anywhere.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

from phasewise.errors import UserError
from phasewise.model.parse import parse_config
from phasewise.model.source import source
from phasewise.train.passes import LayerPass, Pass, Past, Rope, Sizes

PADDED = 256
"""Rows that go through the head come in multiples of this: oneDNN keeps what it prepared for every number of rows that
it ever met, copies of the weights among it, and numbers differ from step to step (14 GB over a vocabulary of 49,152).
"""


@dataclass(frozen=True)
class DenseShape:
    """The sizes of one decoder; embeddings are tied to the output head."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    intermediate_size: int
    head_dim: int = 64
    max_position_embeddings: int = 2048
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5


class TokenBlock(NamedTuple):
    """Rows of like length.

    targets[r, t] is the token that follows ids[r, t], or negative for no loss; positions feed the rotary embedding.
    """

    ids: Tensor  # int64 [rows, length]
    targets: Tensor  # int64 [rows, length]
    positions: Tensor  # int64 [rows, length]

    @classmethod
    def of(cls, ids: Tensor, targets: Tensor) -> TokenBlock:
        """Rows whose positions count from 0."""
        return cls(ids, targets, torch.arange(ids.shape[1], device=ids.device).expand_as(ids))


SHORT = 1200
"""On a CPU, rows shorter than this attend by plain products: the fused kernel's backward pass is slower there."""

PLAIN = Pass()


class Attention(nn.Module):
    """Grouped-query causal self-attention with rotary positions."""

    def __init__(self, shape: DenseShape) -> None:
        super().__init__()
        self.shape = shape
        width, kv_width = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, width, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, kv_width, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, kv_width, bias=False)
        self.o_proj = nn.Linear(width, shape.hidden_size, bias=False)

    def forward(self, x: Tensor, rope: Rope, scene: LayerPass) -> Tensor:
        """Mix x [tokens, hidden] within each row of each block."""
        q, k, v = self._project(x, scene)
        split = (len(x), -1, self.shape.head_dim)
        q = rotate(q.view(split), rope)  # [tokens, heads, head_dim]
        k = rotate(k.view(split), rope)  # [tokens, kv_heads, head_dim]
        counts = [rows * length for rows, length in scene.sizes]
        parts = (torch.split(scene.spread(part), counts) for part in (q, k, v.view(split)))
        mixed = torch.cat([self._block(number, part, scene) for number, part in enumerate(zip(*parts, strict=True))])
        mixed = scene.gather(mixed)
        out: Tensor = self.o_proj(mixed)
        change = scene.change("o", mixed)
        return out if change is None else out + change

    def _project(self, x: Tensor, scene: LayerPass) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        change = scene.change("qkv", x)
        if change is None:
            return q, k, v
        more = torch.split(change, [q.shape[1], k.shape[1], v.shape[1]], 1)
        return q + more[0], k + more[1], v + more[2]

    def _block(self, number: int, part: tuple[Tensor, ...], scene: LayerPass) -> Tensor:
        size = scene.sizes[number]
        q, k, v = (each.view(*size, *each.shape[1:]) for each in part)  # [rows, length, heads, D]
        k, v, mask = scene.reads(number, k, v)
        if scene.how.picks is not None:
            mask = scene.how.picks(scene.layer, number, q, k)
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))  # [rows, heads, length, D]
        groups = self.shape.num_attention_heads // self.shape.num_key_value_heads
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        if mask is not None:
            mask = mask[:, None] if mask.ndim == 3 else mask.repeat_interleave(groups, 1)  # of all heads, or of each
        if size[1] < SHORT and q.device.type == "cpu":
            mixed = _plain(q, k, v, mask)
        elif mask is None:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        if scene.how.blend is not None:
            share = scene.how.blend.share[scene.layer].repeat_interleave(groups)[:, None, None]  # [heads, 1, 1]
            mixed = share * mixed + (1 - share) * _plain(q, k, v, scene.how.blend.near[number][:, None])
        return mixed.transpose(1, 2).reshape(size[0] * size[1], -1)


def _plain(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    if mask is None:
        hidden = torch.full((q.shape[2], q.shape[2]), -math.inf, dtype=q.dtype, device=q.device).triu_(1)
    else:
        hidden = torch.zeros(mask.shape, dtype=q.dtype, device=q.device).masked_fill_(~mask, -math.inf)
    scores = torch.matmul(q * q.shape[-1] ** -0.5, k.transpose(2, 3)) + hidden
    return torch.matmul(scores.softmax(-1), v)


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: DenseShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor, scene: LayerPass) -> Tensor:
        gate, up = self.gate_proj(x), self.up_proj(x)
        change = scene.change("gate_up", x)
        if change is not None:
            more = change.chunk(2, 1)
            gate, up = gate + more[0], up + more[1]
        inner = F.silu(gate) * up
        out: Tensor = self.down_proj(inner)
        change = scene.change("down", inner)
        return out if change is None else out + change


class Norm(nn.RMSNorm):
    """RMS normalisation whose weight follows the input's type, which keeps the fused kernel under autocast."""

    def forward(self, x: Tensor) -> Tensor:
        assert self.weight is not None
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


class DenseLayer(nn.Module):
    """One pre-norm decoder layer."""

    def __init__(self, shape: DenseShape) -> None:
        super().__init__()
        self.self_attn = Attention(shape)
        self.mlp = FeedForward(shape)
        self.input_layernorm = Norm(shape.hidden_size, shape.rms_norm_eps)
        self.post_attention_layernorm = Norm(shape.hidden_size, shape.rms_norm_eps)

    def forward(self, x: Tensor, rope: Rope, scene: LayerPass) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rope, scene)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x), scene)
        return out


class DenseDecoder(nn.Module):
    """The decoder: token ids in, final hidden states or logits out."""

    def __init__(self, shape: DenseShape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(DenseLayer(shape) for _ in range(shape.num_hidden_layers))
        self.norm = Norm(shape.hidden_size, shape.rms_norm_eps)
        self._rope: tuple[Tensor, Tensor] | None = None
        self._initialise()

    def _initialise(self) -> None:
        # Layers start as the identity and embeddings are large, so that the residual stream keeps saying which token
        # it stands on; a small final norm then keeps the tied head's first predictions nearly flat.
        for name, parameter in self.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                nn.init.zeros_(parameter)
            elif parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.25 if name.startswith("embed") else 0.5 * parameter.shape[1] ** -0.5)
        nn.init.constant_(self.norm.weight, 0.1)

    def rope(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the rotary angles, float32 [tokens, 1, head_dim] each, of int64 positions [tokens]."""
        half = torch.arange(0, self.shape.head_dim, 2, device=positions.device, dtype=torch.float32)
        angles = torch.outer(positions.float(), self.shape.rope_theta ** (-half / self.shape.head_dim))
        angles = torch.cat((angles, angles), dim=-1).unsqueeze(1)
        return angles.cos(), angles.sin()

    def hidden(self, blocks: Sequence[TokenBlock], how: Pass = PLAIN) -> Tensor:
        """Final normalised hidden states [tokens, hidden] of all tokens of all blocks, padding included."""
        x = self.embed_tokens(torch.cat([block.ids.flatten() for block in blocks]))
        rope = self.rope(torch.cat([block.positions.flatten() for block in blocks]))
        if torch.is_autocast_enabled(x.device.type):
            x, rope = x.bfloat16(), (rope[0].bfloat16(), rope[1].bfloat16())
        if how.soft is not None:
            x = x.index_copy(0, how.soft[0], how.soft[1].to(x.dtype))
        sizes: Sizes = [(block.ids.shape[0], block.ids.shape[1]) for block in blocks]
        for i in range(len(self.layers)):
            gate = how.gate(i)
            if isinstance(gate, Tensor):
                rows = gate.nonzero().squeeze(1)
                some = self.layers[i](x[rows], (rope[0][rows], rope[1][rows]), LayerPass(i, how, sizes, rows))
                x = x.index_copy(0, rows, some)
            elif gate:
                x = self.layers[i](x, rope, LayerPass(i, how, sizes, None))
            if i in how.taps:
                how.taps[i] = x
        out: Tensor = self.norm(x)
        return out

    @torch.no_grad()
    def prefill(self, blocks: Sequence[TokenBlock], real: Sequence[Tensor]) -> list[Past]:
        """The keys and values of every block at full depth; `real`: bool [rows, length], what is no padding."""
        kept = [Past(some) for some in real]
        self.hidden(blocks, Pass(kept=kept))
        return kept

    def forward(self, ids: Tensor) -> Tensor:
        """Logits [rows, length, vocab] of int64 ids [rows, length] at positions from 0."""
        return F.linear(self.hidden([TokenBlock.of(ids, ids)]), self.embed_tokens.weight).view(*ids.shape, -1)


def rotate(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Apply rotary positions to [tokens, heads, head_dim], half-split layout."""
    cos, sin = rope
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def losses(model: DenseDecoder, blocks: Sequence[TokenBlock], how: Pass = PLAIN) -> list[Tensor]:
    """Cross-entropies (nats) of the learned tokens of each block, float32 [learned] each, in reading order."""
    targets = torch.cat([block.targets.flatten() for block in blocks])
    wanted = targets >= 0
    hidden, targets = model.hidden(blocks, how)[wanted], targets[wanted]
    spare = -len(targets) % PADDED
    logits = F.linear(F.pad(hidden, (0, 0, 0, spare)), model.embed_tokens.weight)  # [learned and spare rows, vocab]
    each = F.cross_entropy(logits.float(), F.pad(targets, (0, spare)), reduction="none")
    return list(torch.split(each[: len(targets)], [int((block.targets >= 0).sum()) for block in blocks]))


def save(model: DenseDecoder, folder: Path, eos: Sequence[int], bos: int | None = None) -> None:
    """Write config.json, generation_config.json and bf16 model.safetensors in the Hugging Face layout."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {f"model.{name}": value.detach().to("cpu", torch.bfloat16) for name, value in model.named_parameters()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = asdict(model.shape) | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "bos_token_id": bos,
        "eos_token_id": list(eos),
    }
    generation = {"bos_token_id": bos, "eos_token_id": list(eos), "do_sample": False}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")


def load(path: str | Path) -> DenseDecoder:
    """Read back what `save` wrote, or another Llama whose embeddings are tied, in float32.

    Raises UserError for a model that this decoder is no twin of.
    """
    files = source(path)
    raw, known = files.settings(), parse_config(files.settings())
    rope = known.ropes[0]
    said = {
        "model_type": (known.family, "llama"),
        "tie_word_embeddings": (known.tied, True),
        "hidden_act": (known.activation, "silu"),
        "attention_bias": (known.qkv_bias, False),
        "mlp_bias": (known.mlp_bias, False),
        "rope_type": (rope.scheme, "default"),
        "partial_rotary_factor": (rope.dim / known.head_dim, 1.0),
    }
    odd = [f"{key}={its!r}" for key, (its, plain) in said.items() if its != plain]
    if odd:
        raise UserError(
            f"{files.path}: training knows plain Llamas with tied embeddings, this one has {', '.join(odd)}"
        )
    theta = raw.mapping("rope_parameters").get("rope_theta") or raw.number("rope_theta", DenseShape.rope_theta)
    shape = DenseShape(known.vocab, known.hidden, known.layers, known.heads, known.kv_heads, known.intermediate,
                  known.head_dim, known.max_positions, theta, known.eps)  # fmt: skip
    model, tensors = DenseDecoder(shape), files.tensors()
    model.load_state_dict({name: tensors.read(f"model.{name}", torch.float32).float() for name in model.state_dict()})
    return model


def of_layers(model: DenseDecoder, keep: Sequence[int]) -> DenseDecoder:
    """A decoder of some of the layers, which shares the weights."""
    made = DenseDecoder(replace(model.shape, num_hidden_layers=len(keep)))
    made.embed_tokens, made.norm = model.embed_tokens, model.norm
    made.layers = nn.ModuleList(model.layers[i] for i in keep)
    return made
