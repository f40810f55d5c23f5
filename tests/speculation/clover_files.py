"""Clover's heads as tiny files, and their forward written a second time in plain torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from tests import oracle
from tests.speculation.eagle_files import Plain, block, matrices, normed, save, settings

HEADS, GUESSES = 4, 3  # of the attention decoder; MLPs


def clover(path: Path, d: int, *, layers: int = 4, guesses: int = GUESSES, blocks: int = 1, seed: int = 1) -> Path:
    """For a target of so many layers, with so many augmenting blocks. Biases are small and not zero."""
    tensors = matrices(seed + 1, norm__weight=(d,), decoder__input_norm__weight=(d,))
    for i in range(blocks):
        tensors |= block(seed + 10 * i, f"layers.{i}", d, d) | matrices(
            seed + 2 + 10 * i, **{f"layers__{i}__input_layernorm__weight": (d,)}
        )
    linears = [f"decoder.{name}" for name in ("query", "key", "value")]
    linears += [f"mlps.{i}.layers.0" for i in range(guesses)]
    gen = torch.Generator().manual_seed(seed + 3)
    for name in linears:
        tensors[f"{name}.weight"] = torch.randn(d, d, generator=gen) * d**-0.5
        tensors[f"{name}.bias"] = torch.randn(d, generator=gen) * 0.1
    config: dict[str, Any] = {
        "architectures": ["CloverSpeculator"], "speculators_model_type": "clover", "num_heads": guesses,
        "decoder_heads": HEADS, "num_target_layers": layers,
        "transformer_layer_config": settings(d, num_hidden_layers=blocks),
    }  # fmt: skip
    return save(path, config, tensors)


class PlainClover(Plain):
    """The heads of a folder beside the target of another, without a cache. `gate`: False takes the cosine for 1."""

    def __init__(self, folder: Path, target: Path, gate: bool = True) -> None:
        super().__init__(folder, target)
        self.w = {name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()}
        self.gate = gate
        held = load_file(target / "model.safetensors")
        rows = held.get("lm_head.weight", held["model.embed_tokens.weight"]).float()
        self.tokens = rows / rows.square().mean(-1, keepdim=True).sqrt()

    def augmented(self, text: Sequence[int]) -> Tensor:
        """s_0 [len(text), d] of the tokens of a text."""
        x, w, every = oracle.states(self.target, text)[-1], self.w, self.w
        for i in range(self.layer["num_hidden_layers"]):
            at = f"layers.{i}."
            self.w = {f"layers.0.{name.removeprefix(at)}": t for name, t in every.items() if name.startswith(at)}
            x = x + self.attention(normed(x, every[f"{at}input_layernorm.weight"]))
            h = normed(x, every[f"{at}post_attention_layernorm.weight"])
            gate, up, down = (every[f"{at}mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
            x = x + (torch.nn.functional.silu(h @ gate.T) * (h @ up.T)) @ down.T
        self.w = every
        return normed(x, w["norm.weight"])

    def onward(self, state: Tensor, token: int) -> Tensor:
        """One state [d] after a token."""
        w, e = self.w, self.tokens[token]
        q = w["decoder.query.weight"] @ normed(state, w["decoder.input_norm.weight"]) + w["decoder.query.bias"]
        k, v = (w[f"decoder.{name}.weight"] @ e + w[f"decoder.{name}.bias"] for name in ("key", "value"))
        size, out = len(state) // HEADS, state.clone()
        for head in range(HEADS):
            own = slice(head * size, (head + 1) * size)
            cosine = (q[own] @ k[own]) / (q[own].norm() * k[own].norm()) if self.gate else torch.ones(())
            out[own] += cosine * v[own]
        return out

    @torch.inference_mode()
    def logits(self, text: Sequence[int], guesses: Sequence[int]) -> Tensor:
        """[1 + guesses, V]: what follows the text, and each guess after it."""
        state, found = self.augmented(text[:-1])[-1], []
        for step, token in enumerate((text[-1], *guesses)):
            state = self.onward(state, token)
            at = f"mlps.{step}.layers.0"
            mixed = self.w[f"{at}.weight"] @ state + self.w[f"{at}.bias"]
            found.append(oracle.unembedded(self.target, state + torch.nn.functional.silu(mixed)))
        return torch.stack(found)
