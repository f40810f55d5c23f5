"""A masked draft model as tiny files, and what it says of a block, written a second time in plain torch.

Nothing of phasewise is imported here. Every row is computed anew, text and masks in one square of attention.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import silu

VOCAB, WIDTH, HEADS, INNER, LAYERS, THETA, EPS = 64, 64, 2, 96, 2, 500.0, 1e-6
LAYER = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCAB + 1, "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": 1, "intermediate_size": INNER,
    "head_dim": WIDTH // HEADS, "max_position_embeddings": 1024, "rope_theta": THETA, "rms_norm_eps": EPS,
    "hidden_act": "silu", "tie_word_embeddings": True,
}  # fmt: skip
TABLE = [[5, 9, 3, 4], [5, 9, 7, 1], [9, 3, 8, 2], [3, 8, 4, 6]]


def masked_files(
    path: Path, *, layer: dict[str, Any] | None = None, trigrams: Any = TABLE, without: str = "", seed: int = 1,
    **more: Any,
) -> Path:  # fmt: skip
    """Random weights in phasewise's own layout; `layer` and `more` change the settings, `without` names a tensor that
    is left out."""
    made, dim = torch.Generator().manual_seed(seed), WIDTH // HEADS
    shapes = {"embed_tokens": (VOCAB + 1, WIDTH), "norm": (WIDTH,)}
    for i in range(LAYERS):
        shapes |= {
            f"layers.{i}.{name}": shape
            for name, shape in {
                "input_layernorm": (WIDTH,), "post_attention_layernorm": (WIDTH,),
                "self_attn.q_proj": (HEADS * dim, WIDTH), "self_attn.k_proj": (dim, WIDTH),
                "self_attn.v_proj": (dim, WIDTH), "self_attn.o_proj": (WIDTH, HEADS * dim),
                "mlp.gate_proj": (INNER, WIDTH), "mlp.up_proj": (INNER, WIDTH), "mlp.down_proj": (WIDTH, INNER),
            }.items()
        }  # fmt: skip
    tensors = {}
    for name, shape in shapes.items():
        drawn = torch.randn(shape, generator=made)
        tensors[f"model.{name}.weight"] = drawn * shape[-1] ** -0.5 if len(shape) > 1 else 1 + 0.2 * drawn
    tensors.pop(without, None)
    if trigrams is not None:
        tensors["trigrams"] = torch.tensor(trigrams)
    config = {"speculators_model_type": "diffuspec", "vocab_size": VOCAB, "mask_token_id": VOCAB, "num_guesses": 8,
              "transformer_layer_config": LAYER | (layer or {})}  # fmt: skip
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config | more))
    save_file(tensors, path / "model.safetensors")
    return path


class PlainBlock:
    """The draft model of a folder."""

    def __init__(self, folder: Path) -> None:
        self.w = {name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()}
        config = json.loads((folder / "config.json").read_text())
        self.mask, self.vocab = config["mask_token_id"], config["vocab_size"]
        layer = config["transformer_layer_config"]
        self.layers, self.dim, self.eps = layer["num_hidden_layers"], layer["head_dim"], layer["rms_norm_eps"]
        self.theta = layer["rope_theta"]

    @torch.inference_mode()
    def logits(self, text: Sequence[int], guesses: int) -> Tensor:
        """What is said of the next tokens, [guesses, V]: by the text's last row, then by `guesses` - 1 masks."""
        known, total = len(text), len(text) + guesses - 1
        x = self.w["model.embed_tokens.weight"][[*text, *[self.mask] * (guesses - 1)]]
        sees = torch.ones(total, total, dtype=torch.bool).tril()
        sees[known:] = True
        for i in range(self.layers):
            x = self.layer(f"model.layers.{i}.", x, sees)
        x = self.normed(x[known - 1 :], "model.norm.weight")
        return x @ self.w["model.embed_tokens.weight"][: self.vocab].T

    def layer(self, at: str, x: Tensor, sees: Tensor) -> Tensor:
        h, w = self.normed(x, at + "input_layernorm.weight"), self.w
        q, k, v = ((h @ w[f"{at}self_attn.{name}_proj.weight"].T).view(len(x), -1, self.dim) for name in "qkv")
        q, k = self.turned(q), self.turned(k)
        scores = torch.einsum("rhd,sd->hrs", q, k[:, 0]) * self.dim**-0.5
        weights = scores.masked_fill(~sees, float("-inf")).softmax(-1)
        out = torch.einsum("hrs,sd->rhd", weights, v[:, 0]).flatten(1)
        x = x + out @ w[at + "self_attn.o_proj.weight"].T
        h = self.normed(x, at + "post_attention_layernorm.weight")
        gate, up, down = (w[f"{at}mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
        return x + (silu(h @ gate.T) * (h @ up.T)) @ down.T

    def turned(self, x: Tensor) -> Tensor:
        half = torch.arange(0, self.dim, 2) / self.dim
        angles = torch.outer(torch.arange(len(x)).float(), self.theta**-half)[:, None]
        first, second = x.chunk(2, -1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)

    def normed(self, x: Tensor, name: str) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + self.eps).rsqrt() * self.w[name]
