"""An independent decoder, which says what a model's tokens are: nothing of phasewise is imported here.

It reads a checkpoint in Hugging Face layout (Llama, or Mixtral with its experts) and computes every position of the
text anew in float32, without a cache, in the most obvious way. `tests/model/test_oracle.py` holds it against
transformers, and the engine against it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import silu

KNOWN = {"llama", "mixtral"}
UNKNOWN = ("rope_scaling", "sliding_window", "attention_bias", "mlp_bias", "quantization_config")  # must not be set


@lru_cache(maxsize=8)
def _read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A checkpoint's settings, and its tensors by name in float32."""
    config = json.loads((path / "config.json").read_text())
    assert config["model_type"] in KNOWN and not any(config.get(name) for name in UNKNOWN), f"not for {path}"
    assert config["hidden_act"] == "silu"
    files = sorted(path.glob("*.safetensors"))
    return config, {name: tensor.float() for file in files for name, tensor in load_file(file).items()}


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * weight


def _turned(x: Tensor, theta: float, positions: Tensor) -> Tensor:
    """Rotary positions [n] on x [n, heads, dim], whose halves hold the two parts of each pair."""
    dim = x.shape[-1]
    angles = positions[:, None] / theta ** (torch.arange(0, dim, 2) / dim)  # [n, dim / 2]
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    a, b = x[..., : dim // 2], x[..., dim // 2 :]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def _attention(x: Tensor, w: dict[str, Tensor], at: str, config: dict[str, Any], positions: Tensor) -> Tensor:
    """Causal attention over x [n, hidden]; each key head serves heads / kv_heads query heads that follow each other."""
    n, heads, kv_heads = len(x), config["num_attention_heads"], config["num_key_value_heads"]
    q, k, v = (x @ w[f"{at}{name}_proj.weight"].T for name in "qkv")
    dim = q.shape[1] // heads
    q, k = (_turned(each.view(n, -1, dim), config["rope_theta"], positions) for each in (q, k))
    k, v = (each.reshape(n, kv_heads, dim).repeat_interleave(heads // kv_heads, 1) for each in (k, v))
    scores = torch.einsum("ihd,jhd->hij", q, k) / dim**0.5
    later = torch.ones(n, n, dtype=torch.bool).triu(1)
    weights = scores.masked_fill(later, float("-inf")).softmax(-1)
    return torch.einsum("hij,jhd->ihd", weights, v).reshape(n, heads * dim) @ w[f"{at}o_proj.weight"].T


def _mlp(x: Tensor, w: dict[str, Tensor], gate: str, up: str, down: str) -> Tensor:
    return (silu(x @ w[f"{gate}.weight"].T) * (x @ w[f"{up}.weight"].T)) @ w[f"{down}.weight"].T


def _experts(x: Tensor, w: dict[str, Tensor], at: str, config: dict[str, Any]) -> Tensor:
    """Of each row, its most likely experts, weighed by their probabilities as if there were no others."""
    best = (x @ w[f"{at}gate.weight"].T).softmax(-1).topk(config["num_experts_per_tok"])
    shares = best.values / best.values.sum(-1, keepdim=True)
    rows = []
    for row, share, chosen in zip(x, shares, best.indices.tolist()):
        each = [_mlp(row, w, *(f"{at}experts.{e}.{name}" for name in ("w1", "w3", "w2"))) for e in chosen]
        rows.append(sum(weight * out for weight, out in zip(share, each)))
    return torch.stack(rows)


@torch.inference_mode()
def states(path: str | Path, tokens: Sequence[int]) -> list[Tensor]:
    """The residual stream, float32 [len(tokens), hidden]: as it enters each layer, and as it leaves the last."""
    return onward(path, _read(Path(path))[1]["model.embed_tokens.weight"][list(tokens)], 0)


@torch.inference_mode()
def onward(path: str | Path, x: Tensor, first: int, positions: Sequence[int] | None = None) -> list[Tensor]:
    """The same for rows x [n, hidden] that enter layer `first`, at positions 0, 1, 2 ... or others: there, and after
    each layer from it on."""
    places = torch.arange(len(x)) if positions is None else torch.tensor(positions)
    config, w = _read(Path(path))
    found, eps = [x], config["rms_norm_eps"]
    for i in range(first, config["num_hidden_layers"]):
        at = f"model.layers.{i}."
        x = x + _attention(_norm(x, w[at + "input_layernorm.weight"], eps), w, at + "self_attn.", config, places)
        h = _norm(x, w[at + "post_attention_layernorm.weight"], eps)
        if config["model_type"] == "mixtral":
            x = x + _experts(h, w, at + "block_sparse_moe.", config)
        else:
            x = x + _mlp(h, w, *(f"{at}mlp.{name}_proj" for name in ("gate", "up", "down")))
        found.append(x)
    return found


@torch.inference_mode()
def last(path: str | Path, x: Tensor) -> Tensor:
    """The final norm of what leaves the last layer."""
    config, w = _read(Path(path))
    return _norm(x, w["model.norm.weight"], config["rms_norm_eps"])


@torch.inference_mode()
def unembedded(path: str | Path, h: Tensor) -> Tensor:
    """The product with the output head."""
    config, w = _read(Path(path))
    return h @ w["model.embed_tokens.weight" if config.get("tie_word_embeddings") else "lm_head.weight"].T


def logits(path: str | Path, tokens: Sequence[int]) -> Tensor:
    """Logits, float32 [len(tokens), vocabulary], of the checkpoint in the directory `path`."""
    return unembedded(path, last(path, states(path, tokens)[-1]))


def greedy(path: str | Path, prompt: Sequence[int], n: int) -> tuple[list[int], list[float]]:
    """`n` greedy tokens by full recomputation, and the gap between the two best logits at each."""
    tokens, gaps = list(prompt), []
    for _ in range(n):
        best = logits(path, tokens)[-1].topk(2)
        tokens.append(int(best.indices[0]))
        gaps.append(float(best.values[0] - best.values[1]))
    return tokens[len(prompt) :], gaps
