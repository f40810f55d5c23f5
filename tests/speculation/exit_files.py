"""Kangaroo's adapter as a tiny file, and its forward written a second time in plain torch.

Nothing of phasewise is imported here but the target's oracle, which imports nothing either.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from tests import oracle, tiny
from tests.speculation.eagle_files import HEADS, matrices, normed, save, settings


def adapter(path: Path, d: int, *, exit: int = 2, kv_heads: int = HEADS, seed: int = 1, **more: Any) -> Path:
    """The layout in which adapters are written here."""
    dim = d // HEADS
    tensors = matrices(
        seed, layers__0__input_layernorm__weight=(d,), norm__weight=(d,),
        layers__0__self_attn__q_proj__weight=(d, d), layers__0__self_attn__k_proj__weight=(kv_heads * dim, d),
        layers__0__self_attn__v_proj__weight=(kv_heads * dim, d), layers__0__self_attn__o_proj__weight=(d, d),
    )  # fmt: skip
    layer = settings(d, num_key_value_heads=kv_heads)
    config = {"speculators_model_type": "kangaroo", "transformer_layer_config": layer, "exit_layer": exit}
    return save(path, config | more, tensors)


class PlainAdapter:
    """The adapter of a folder behind the target of another, without a cache: every row is computed anew."""

    def __init__(self, folder: Path, target: Path) -> None:
        self.target = target
        config = json.loads((folder / "config.json").read_text())
        self.exit, self.layer = config["exit_layer"], config["transformer_layer_config"]
        self.w = {name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()}

    def attention(self, x: Tensor) -> Tensor:
        q, k, v = (x @ self.w[f"layers.0.self_attn.{name}_proj.weight"].T for name in "qkv")
        dim, n = q.shape[1] // HEADS, len(x)
        q, k, v = (each.view(n, -1, dim) for each in (q, k, v))
        angles = torch.arange(n)[:, None, None] / self.layer["rope_theta"] ** (torch.arange(0, dim, 2) / dim)

        def turned(each: Tensor) -> Tensor:
            a, b = each.chunk(2, -1)
            return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1)

        q, k, out = turned(q), turned(k), torch.empty(n, HEADS, dim)
        for row in range(n):
            for head in range(HEADS):
                its = head // (HEADS // k.shape[1])
                weights = (k[: row + 1, its] @ q[row, head] / dim**0.5).softmax(0)
                out[row, head] = weights @ v[: row + 1, its]
        return out.flatten(1) @ self.w["layers.0.self_attn.o_proj.weight"].T

    @torch.inference_mode()
    def logits(self, text: Sequence[int]) -> Tensor:
        """What it says after each token of a text, [n, V]."""
        rows = oracle.states(self.target, text)[self.exit]
        rows = rows + self.attention(normed(rows, self.w["layers.0.input_layernorm.weight"]))
        return oracle.unembedded(self.target, normed(rows, self.w["norm.weight"]))


def tiny_adapter(path: Path, **more: Any) -> Path:
    """One for the tiny model."""
    return adapter(path, 48, vocab_size=tiny.VOCAB, **more)
