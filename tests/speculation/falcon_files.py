"""Falcon's heads as tiny files of each layout, and their forward written a second time in plain torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from tests import oracle, tiny
from tests.speculation.eagle_files import HEADS, KV_HEADS, Plain, block, matrices, normed, save, settings


def falcon(
    path: Path, d: int, *, k: int = 2, bias: bool = True, embeddings: bool = False, names: str = "own", seed: int = 1
) -> Path:
    """The authors' layout, or that of `speculators`, of heads that guess k tokens a pass."""
    tensors = block(seed, "layers.0", d, d)
    for layer, inputs in enumerate((2 * d, d)):
        shapes = {f"lstm__weight_ih_l{layer}": (4 * d, inputs), f"lstm__weight_hh_l{layer}": (4 * d, d)}
        tensors |= {name: 2 * tensor for name, tensor in matrices(seed + 1 + layer, **shapes).items()}
        if bias:
            random = torch.Generator().manual_seed(seed + layer)
            tensors |= {f"lstm.bias_{at}h_l{layer}": torch.randn(4 * d, generator=random) * 0.3 for at in "ih"}
    if embeddings:
        tensors |= matrices(seed + 3, embed_tokens__weight=(tiny.VOCAB, d))
    layer: dict[str, Any] = settings(d, architectures=["LlamaForCausalLM"])
    if names == "speculators":
        layer = {"speculators_model_type": "falcon", "transformer_layer_config": layer}
    return save(path, layer | {"k_mask": k}, tensors)


class PlainFalcon(Plain):
    """The heads of a folder beside the target of another, without a cache: every pair is computed anew."""

    def __init__(self, folder: Path, target: Path) -> None:
        super().__init__(folder, target)
        self.k: int = self.config["k_mask"]

    def recur(self, x: Tensor) -> Tensor:
        """Rows [n, d] of n pairs [n, 2 d], one after the other, through both layers of the LSTM."""
        d = self.embeddings.shape[1]
        for layer in range(2):
            read, again = (self.w[f"lstm.weight_{at}h_l{layer}"] for at in "ih")
            bias = sum(self.w.get(f"lstm.bias_{at}h_l{layer}", torch.zeros(4 * d)) for at in "ih")
            hidden, cell, rows = torch.zeros(d), torch.zeros(d), list[Tensor]()
            for pair in x:
                opened, kept, new, shown = (read @ pair + again @ hidden + bias).chunk(4)
                cell = kept.sigmoid() * cell + opened.sigmoid() * new.tanh()
                hidden = shown.sigmoid() * cell.tanh()
                rows.append(hidden)
            x = torch.stack(rows)
        return x

    def outputs(self, embedded: Tensor, features: Tensor, sees: Tensor) -> Tensor:
        """Outputs [n, d] of n pairs, each of which sees the rows that `sees` bool [n, n] tells."""
        w = self.w
        x = self.recur(torch.cat((embedded, features), -1))
        x = x + self.seen(x, sees)
        h = normed(x, w["layers.0.post_attention_layernorm.weight"])
        gate, up, down = (w[f"layers.0.mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
        return x + (silu(h @ gate.T) * (h @ up.T)) @ down.T

    def seen(self, x: Tensor, sees: Tensor) -> Tensor:
        w, n = {name: self.w[f"layers.0.self_attn.{name}_proj.weight"] for name in "qkvo"}, len(x)
        dim = w["q"].shape[0] // HEADS
        q, k, v = ((x @ w[name].T).view(n, -1, dim) for name in "qkv")
        angles = torch.arange(n)[:, None, None] / self.layer["rope_theta"] ** (torch.arange(0, dim, 2) / dim)

        def turned(each: Tensor) -> Tensor:
            a, b = each.chunk(2, -1)
            return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1)

        q, k, out = turned(q), turned(k), torch.empty(n, HEADS, dim)
        for row in range(n):
            for head in range(HEADS):
                its = head // (HEADS // KV_HEADS)
                weights = (k[sees[row], its] @ q[row, head] / dim**0.5).softmax(0)
                out[row, head] = weights @ v[sees[row], its]
        return out.flatten(1) @ w["o"].T

    def last(self, embedded: Tensor, features: Tensor) -> Tensor:
        """Outputs [k, d] of the last k pairs, which see all."""
        return self.outputs(embedded, features, torch.ones(len(features), len(features), dtype=torch.bool))[-self.k :]

    @torch.inference_mode()
    def logits(self, text: Sequence[int], guesses: Sequence[int]) -> Tensor:
        """[1 + guesses, V]: what follows the text, and each guess after it."""
        features, embedded, found = self.features(text[:-1]), self.embeddings[list(text[1:])], list[Tensor]()
        for start in range(0, len(guesses) + 1, self.k):
            outputs = self.last(embedded, features)
            found.append(oracle.unembedded(self.target, outputs))
            own = list(guesses[start : start + self.k])
            features, embedded = torch.cat((features, outputs[: len(own)])), torch.cat((embedded, self.embeddings[own]))
        return torch.cat(found)[: len(guesses) + 1]
