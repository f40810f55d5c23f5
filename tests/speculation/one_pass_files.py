"""Tiny heads that guess several tokens in one pass, as files of each published layout, and their forward written a
second time in plain torch.

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
from torch.nn.functional import silu

from tests import oracle, tiny
from tests.speculation.eagle_files import block, matrices, normed, save, settings, speculators, vocabulary

MASK = 62
DIM = 16  # of a head in a Qwen 3's layers


def peagle(path: Path, d: int, *, names: str = "speculators", layers: int = 2, draft: int = tiny.VOCAB) -> Path:
    """P-EAGLE's heads in the layout of `speculators`, or in EAGLE-3's own with a mask (`names` is "eagle")."""
    folder = speculators(path, d, draft=draft)
    tensors = load_file(folder / "model.safetensors") | matrices(11, mask_hidden=(1, 1, 3 * d))
    for i in range(1, layers):
        tensors |= block(20 + i, f"layers.{i}", d, d)
        tensors |= matrices(30 + i, **{f"layers__{i}__input_layernorm__weight": (d,)})
    config = json.loads((folder / "config.json").read_text())
    if names == "speculators":
        config |= {"speculators_model_type": "peagle", "mask_token_id": MASK, "architectures": ["PEagleSpeculator"]}
        config["transformer_layer_config"]["num_hidden_layers"] = layers
        return save(path, config, tensors)
    tensors["mask_hidden"] = tensors["mask_hidden"][0]
    own = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in tensors.items()}
    own.pop("verifier_norm.weight")
    more = {"num_hidden_layers": layers, "draft_vocab_size": draft, "ptd_token_id": MASK}
    aux = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}}
    return save(path, settings(d, architectures=["LlamaForCausalLMEagle3"], **more, **aux), own)


def dflash(
    path: Path, d: int, *, names: str = "dflash", layers: int = 2, size: int = 6, aux: Sequence[int] = (1, 3, 4),
    draft: int = 0, inner: bool = False, target: int = 8, seed: int = 1,
) -> Path:  # fmt: skip
    """DFlash's heads in its own layout or in that of `speculators`, over the input of the layers `aux`. `draft`: tokens
    of an output head of their own; `inner`: the block's size stands in `dflash_config`."""
    tensors = matrices(seed, fc__weight=(d, len(aux) * d), hidden_norm__weight=(d,), norm__weight=(d,))
    for i in range(layers):
        tensors |= block(seed + 10 + i, f"layers.{i}", d, d, dim=DIM, qk_norm=True)
        tensors |= matrices(seed + 30 + i, **{f"layers__{i}__input_layernorm__weight": (d,)})
    if draft:
        tensors |= vocabulary(draft) | matrices(
            seed + 2, lm_head__weight=(draft, d), embed_tokens__weight=(tiny.VOCAB, d)
        )
    layer = settings(d, model_type="qwen3", head_dim=DIM, num_hidden_layers=layers)
    if names == "dflash":
        own: dict[str, Any] = {"mask_token_id": MASK, "target_layer_ids": [i - 1 for i in aux]}
        said = {"block_size": size}
        more = {"architectures": ["DFlashDraftModel"], "num_target_layers": target}
        config = layer | more | {"dflash_config": own | (said if inner else {})} | ({} if inner else said)
    else:
        config = {
            "architectures": ["DFlashSpeculator"], "speculators_model_type": "dflash", "block_size": size,
            "transformer_layer_config": layer, "draft_vocab_size": draft or tiny.VOCAB, "mask_token_id": MASK,
            "aux_hidden_state_layer_ids": list(aux),
        }  # fmt: skip
    return save(path, config, tensors)


class PlainPass:
    """The heads of a folder beside the target of another: one pass over a text and masks, without a cache."""

    def __init__(self, folder: Path, target: Path, mask: int = MASK) -> None:
        self.mask = mask
        self.target, self.config = target, json.loads((folder / "config.json").read_text())
        self.layer = self.config.get("transformer_layer_config", self.config)
        self.theta, self.heads = self.layer["rope_theta"], self.layer["num_attention_heads"]
        held = load_file(folder / "model.safetensors")
        self.w = {name.replace("midlayer.", "layers.0."): t.float() if t.is_floating_point() else t
                  for name, t in held.items()}  # fmt: skip
        theirs = load_file(target / "model.safetensors")["model.embed_tokens.weight"]
        self.embeddings = self.w.get("embed_tokens.weight", theirs)

    @torch.inference_mode()
    def logits(self, text: Sequence[int], guesses: int) -> Tensor:
        """[guesses, V]: what follows a text, and what follows each guess."""
        rows = self.masked_tail(text, guesses) if "mask_hidden" in self.w else self.masked_block(text, guesses)
        rows = normed(rows, self.w["norm.weight"])
        if "lm_head.weight" not in self.w:
            return oracle.unembedded(self.target, rows)
        own = rows @ self.w["lm_head.weight"].T
        if "d2t" not in self.w:
            return own
        logits = torch.full((guesses, tiny.VOCAB), float("-inf"))
        logits[:, torch.arange(own.shape[-1]) + self.w["d2t"]] = own
        return logits

    def masked_tail(self, text: Sequence[int], guesses: int) -> Tensor:
        w, at = self.w, "layers.0."
        aux = self.config.get("eagle_aux_hidden_state_layer_ids") or [1, 3, 4]
        states = oracle.states(self.target, text[:-1])
        wide = torch.cat([states[i] for i in aux], -1)
        wide = torch.cat((wide, w["mask_hidden"].view(1, -1).expand(guesses - 1, -1)))
        features = wide @ w["fc.weight"].T
        embedded = self.embeddings[[*text[1:], *[self.mask] * (guesses - 1)]]
        parts = (
            normed(embedded, w[at + "input_layernorm.weight"]),
            normed(features, w[at + "hidden_norm.weight"]),
        )
        n = len(embedded)
        sees = torch.ones(n, n, dtype=torch.bool).tril()
        x = torch.cat(parts, -1)
        x = self.after(0, features, self.attention(0, x, x, sees, range(n), range(n)))
        for i in range(1, self.layer["num_hidden_layers"]):
            h = normed(x, w[f"layers.{i}.input_layernorm.weight"])
            x = self.after(i, x, self.attention(i, h, h, sees, range(n), range(n)))
        return x[n - guesses :]

    def masked_block(self, text: Sequence[int], guesses: int) -> Tensor:
        w, n = self.w, len(text) - 1
        own = self.config.get("dflash_config", {})
        aux = self.config.get("aux_hidden_state_layer_ids") or [i + 1 for i in own["target_layer_ids"]]
        states = oracle.states(self.target, text[:-1])
        features = torch.cat([states[i] for i in aux], -1) @ w["fc.weight"].T
        features = normed(features, w["hidden_norm.weight"])
        x = self.embeddings[[text[-1], *[self.mask] * guesses]]
        everything = torch.ones(1 + guesses, n + 1 + guesses, dtype=torch.bool)
        for i in range(self.layer["num_hidden_layers"]):
            h = normed(x, w[f"layers.{i}.input_layernorm.weight"])
            read = self.attention(
                i, h, torch.cat((features, h)), everything, range(n, n + 1 + guesses), range(n + 1 + guesses)
            )
            x = self.after(i, x, read)
        return x[1:]

    def after(self, i: int, residual: Tensor, read: Tensor) -> Tensor:
        x = residual + read
        h = normed(x, self.w[f"layers.{i}.post_attention_layernorm.weight"])
        gate, up, down = (self.w[f"layers.{i}.mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
        return x + (silu(h @ gate.T) * (h @ up.T)) @ down.T

    def attention(
        self, i: int, x: Tensor, y: Tensor, sees: Tensor, places: Sequence[int], others: Sequence[int]
    ) -> Tensor:
        """Rows x at some places read rows y at others, as far as they see them."""
        at = f"layers.{i}.self_attn."
        w = {name: self.w[f"{at}{name}_proj.weight"] for name in "qkvo"}
        dim = w["q"].shape[0] // self.heads
        q, k, v = ((rows @ w[name].T).view(len(rows), -1, dim) for name, rows in (("q", x), ("k", y), ("v", y)))
        if f"{at}q_norm.weight" in self.w:
            q, k = normed(q, self.w[f"{at}q_norm.weight"]), normed(k, self.w[f"{at}k_norm.weight"])

        def turned(each: Tensor, where: Sequence[int]) -> Tensor:
            rates = self.theta ** (torch.arange(0, dim, 2) / dim)
            angles = torch.tensor(list(where))[:, None, None] / rates
            a, b = each.chunk(2, -1)
            return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1)

        q, k = turned(q, places), turned(k, others).repeat_interleave(self.heads // k.shape[1], 1)
        v = v.repeat_interleave(self.heads // v.shape[1], 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) / dim**0.5
        weights = scores.masked_fill(~sees, float("-inf")).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, v).flatten(1) @ w["o"].T
