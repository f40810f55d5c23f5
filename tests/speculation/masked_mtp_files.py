"""Masks, low-rank weights and sampler as a tiny file, and what a model says after them, written a second time in plain
torch.

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
from torch.nn.functional import layer_norm, silu

from tests import oracle, tiny
from tests.speculation.eagle_files import matrices, save

LAYERS, HEADS, KV_HEADS = 4, 4, 2  # of the tiny model, whose MLP is twice as wide as it


def tiny_masks(path: Path, *, d: int = 48, masks: int = 3, rank: int = 2, seed: int = 1, **more: Any) -> Path:
    """Random ones for the tiny model, in the layout in which they are written here."""
    kv, inner = d * KV_HEADS // HEADS, 2 * d
    linears = {"qkv": (d, d + 2 * kv), "o": (d, d), "gate_up": (d, 2 * inner), "down": (inner, d)}
    shapes: dict[str, tuple[int, ...]] = {"masks": (masks, d)}
    for layer in range(LAYERS):
        for linear, (inputs, outputs) in linears.items():
            shapes[f"low_rank__{layer}__{linear}__a"] = (rank, inputs)
            shapes[f"low_rank__{layer}__{linear}__b"] = (outputs, rank)
    for block, inputs in ((0, 2 * d), (3, d)):
        linear, norm = f"sampler__blocks__{block}", f"sampler__blocks__{block + 2}"
        shapes |= {f"{linear}__weight": (d, inputs), f"{linear}__bias": (d,)}
        shapes |= {f"{norm}__weight": (d,), f"{norm}__bias": (d,)}
    config = {"speculators_model_type": "masked_mtp", "hidden_size": d, "vocab_size": tiny.VOCAB, "num_masks": masks,
              "lora_rank": rank}  # fmt: skip
    return save(path, config | more, matrices(seed, **shapes))


class PlainMasks:
    """The masks of a folder behind texts of a target, without a cache: every row is computed anew."""

    def __init__(self, folder: Path, target: Path) -> None:
        self.target = target
        self.own = {name: each.float() for name, each in load_file(folder / "model.safetensors").items()}
        self.w = {name: each.float() for name, each in load_file(target / "model.safetensors").items()}
        self.config = json.loads((target / "config.json").read_text())

    @torch.inference_mode()
    def states(self, text: Sequence[int]) -> Tensor:
        """The target's states after the masks behind a text, after its final norm, [masks, d]. They are the text's next
        rows, and they alone run with the low-rank weights."""
        x = torch.cat((oracle.states(self.target, text)[0], self.own["masks"]))
        for layer in range(self.config["num_hidden_layers"]):
            x = self._layer(layer, x, len(text))
        return oracle.last(self.target, x)[len(text) :]

    def _layer(self, layer: int, x: Tensor, real: int) -> Tensor:
        at, eps = f"model.layers.{layer}.", self.config["rms_norm_eps"]
        heads, kv_heads = self.config["num_attention_heads"], self.config["num_key_value_heads"]
        norms = [self.w[f"{at}{name}_layernorm.weight"] for name in ("input", "post_attention")]

        def product(linear: str, h: Tensor, *names: str) -> Tensor:
            y = h @ torch.cat([self.w[f"{at}{name}_proj.weight"] for name in names]).T
            a, b = (self.own[f"low_rank.{layer}.{linear}.{part}"] for part in "ab")
            y[real:] += h[real:] @ a.T @ b.T
            return y

        qkv = product("qkv", _rms(x, norms[0], eps), *(f"self_attn.{part}" for part in "qkv"))
        q, k, v = qkv.view(len(x), heads + 2 * kv_heads, -1).split((heads, kv_heads, kv_heads), 1)
        q, k = (_turned(each, self.config["rope_theta"]) for each in (q, k))
        k, v = (each.repeat_interleave(heads // kv_heads, 1) for each in (k, v))
        scores = torch.einsum("ihd,jhd->hij", q, k) / q.shape[-1] ** 0.5
        later = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
        weights = scores.masked_fill(later, float("-inf")).softmax(-1)
        x = x + product("o", torch.einsum("hij,jhd->ihd", weights, v).flatten(1), "self_attn.o")
        gate, up = product("gate_up", _rms(x, norms[1], eps), "mlp.gate", "mlp.up").chunk(2, -1)
        return x + product("down", silu(gate) * up, "mlp.down")

    @torch.inference_mode()
    def plain(self, states: Tensor) -> Tensor:
        """What the target's output head says after states, [n, V]."""
        return oracle.unembedded(self.target, states)

    @torch.inference_mode()
    def sampled(self, token: int, state: Tensor) -> Tensor:
        """What it says after what the sampler makes of a token and a state [d]: [V]."""
        x = torch.cat((self.w["model.embed_tokens.weight"][token], state))
        for block in (0, 3):
            w = {part: self.own[f"sampler.blocks.{block}.{part}"] for part in ("weight", "bias")}
            norm = [self.own[f"sampler.blocks.{block + 2}.{part}"] for part in ("weight", "bias")]
            x = layer_norm(silu(w["weight"] @ x + w["bias"]), w["bias"].shape, *norm)
        return oracle.unembedded(self.target, x)

    def guesses(self, text: Sequence[int], depth: int, sampler: bool = True) -> list[int]:
        """The guesses of the tokens behind the last one of a text, which is pending: its last but one token has
        masks."""
        states, path = self.states(text[:-1]), [text[-1]]
        for state in states[:depth]:
            logits = self.sampled(path[-1], state) if sampler else self.plain(state)
            path.append(int(logits.argmax()))
        return path[1:]


def _rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


def _turned(x: Tensor, theta: float) -> Tensor:
    """Rotary positions 0, 1, 2 ... on x [n, heads, dim], whose halves hold the two parts of each pair."""
    half = x.shape[-1] // 2
    angles = (torch.arange(len(x))[:, None] / theta ** (torch.arange(half) / half))[:, None]  # [n, 1, half]
    a, b = x.split(half, -1)
    return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1)
