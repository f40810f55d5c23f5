"""A small differentiable Llama decoder over padded batches, used only for training.

Rows start at position 0 and are padded on the right, so plain causal attention is exact for every real token.
Parameter names and config keys follow the Hugging Face Llama layout, so an export loads anywhere.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Shape:
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


class Attention(nn.Module):
    """Grouped-query causal self-attention with rotary positions."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        width, kv_width = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, width, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, kv_width, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, kv_width, bias=False)
        self.o_proj = nn.Linear(width, shape.hidden_size, bias=False)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        rows, length, _ = x.shape
        split = (rows, length, -1, self.shape.head_dim)
        q = rotate(self.q_proj(x).view(split).transpose(1, 2), rope)  # [rows, heads, length, head_dim]
        k = rotate(self.k_proj(x).view(split).transpose(1, 2), rope)  # [rows, kv_heads, length, head_dim]
        v = self.v_proj(x).view(split).transpose(1, 2)
        groups = self.shape.num_attention_heads // self.shape.num_key_value_heads
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.o_proj(mixed.transpose(1, 2).reshape(rows, length, -1))
        return out


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Norm(nn.RMSNorm):
    """RMS normalisation whose weight follows the input's type, which keeps the fused kernel under autocast."""

    def forward(self, x: Tensor) -> Tensor:
        assert self.weight is not None
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


class Layer(nn.Module):
    """One pre-norm decoder layer."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.self_attn = Attention(shape)
        self.mlp = FeedForward(shape)
        self.input_layernorm = Norm(shape.hidden_size, shape.rms_norm_eps)
        self.post_attention_layernorm = Norm(shape.hidden_size, shape.rms_norm_eps)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rope)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Dense(nn.Module):
    """The decoder: token ids in, final hidden states or logits out."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_hidden_layers))
        self.norm = Norm(shape.hidden_size, shape.rms_norm_eps)
        self.stride = 1  # every how-manieth layer runs; the others, still at their zero start, would change nothing
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

    def rope(self, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the rotary angles, float32 [length, head_dim] each."""
        if self._rope is None or self._rope[0].shape[0] < length or self._rope[0].device != device:
            half = torch.arange(0, self.shape.head_dim, 2, device=device, dtype=torch.float32)
            frequencies = self.shape.rope_theta ** (-half / self.shape.head_dim)
            angles = torch.outer(torch.arange(length, device=device, dtype=torch.float32), frequencies)
            angles = torch.cat((angles, angles), dim=-1)  # [length, head_dim]
            self._rope = angles.cos(), angles.sin()
        return self._rope[0][:length], self._rope[1][:length]

    def hidden(self, ids: Tensor) -> Tensor:
        """Final normalised hidden states [rows, length, hidden] of int64 ids [rows, length]."""
        x = self.embed_tokens(ids)
        cos, sin = self.rope(ids.shape[1], ids.device)
        if torch.is_autocast_enabled(ids.device.type):
            x, cos, sin = x.bfloat16(), cos.bfloat16(), sin.bfloat16()
        for layer in self.layers[:: self.stride]:
            x = layer(x, (cos, sin))
        out: Tensor = self.norm(x)
        return out

    def forward(self, ids: Tensor) -> Tensor:
        """Logits [rows, length, vocab]."""
        return F.linear(self.hidden(ids), self.embed_tokens.weight)


def rotate(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Apply rotary positions to [rows, heads, length, head_dim], half-split layout."""
    cos, sin = rope
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def summed_loss(model: Dense, ids: Tensor, targets: Tensor) -> tuple[Tensor, int]:
    """Summed cross-entropy (nats) over the targets that are not negative, and how many there are.

    ids and targets are int64 [rows, length]; targets[r, t] is the token that follows ids[r, t], or -1 for no loss.
    """
    wanted = targets >= 0
    states = model.hidden(ids)[wanted]  # [wanted, hidden]
    logits = F.linear(states, model.embed_tokens.weight)  # [wanted, vocab]
    return F.cross_entropy(logits.float(), targets[wanted], reduction="sum"), int(wanted.sum())


def save(model: Dense, folder: Path, eos: Sequence[int]) -> None:
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
        "bos_token_id": None,
        "eos_token_id": list(eos),
    }
    generation = {"bos_token_id": None, "eos_token_id": list(eos), "do_sample": False}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")


def load(folder: Path) -> Dense:
    """Read back what `save` wrote, in float32."""
    config = json.loads((folder / "config.json").read_text())
    shape = Shape(**{name: config[name] for name in Shape.__dataclass_fields__})
    model = Dense(shape)
    tensors = load_file(folder / "model.safetensors")
    model.load_state_dict({name.removeprefix("model."): value.float() for name, value in tensors.items()})
    return model
