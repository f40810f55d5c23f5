"""Chimera's heads as tiny files of each layout, and their forward written a second time in plain torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from tests import oracle, tiny
from tests.speculation.eagle_files import Plain, block, matrices, normed, save, settings


def chimera(
    path: Path, d: int, *, heads: int = 3, own: bool = False, ngram: int = 3, names: str = "speculators", seed: int = 1
) -> Path:
    """The layout of `speculators`, or the authors' names of tensors, whose heads have output matrices of their own."""
    at = "layers.0" if names == "speculators" else "fast_layer1.0"
    tensors = block(seed, at, d, d)
    tensors |= matrices(
        seed + 1, trimlp__0__linear__weight=(3 * d, 3 * d), trimlp__1__weight=(d, 3 * d),
        **{f"{at.replace('.', '__')}__input_layernorm__weight": (d,)},
        **{f"chimera_head__{i}__0__weight": (tiny.VOCAB if own else d, 2 * d) for i in range(heads)},
    )  # fmt: skip
    tensors["trimlp.0.linear.bias"] = torch.randn(3 * d, generator=torch.Generator().manual_seed(seed)) * 0.1
    layer: dict[str, Any] = settings(d, architectures=["LlamaForCausalLM"])
    if names == "speculators":
        layer = {"speculators_model_type": "chimera", "transformer_layer_config": layer}
    if not own:
        layer |= {"original_lm_head": True}
    if ngram != 3:
        layer |= {"ngram": ngram}
    return save(path, layer, tensors)


class PlainChimera(Plain):
    """The heads of a folder beside the target of another, without a cache."""

    def __init__(self, folder: Path, target: Path) -> None:
        super().__init__(folder, target)
        self.w = {name.replace("fast_layer1.0.", "layers.0."): tensor for name, tensor in self.w.items()}

    def trigram(self, tokens: Sequence[int]) -> Tensor:
        """Of the last of these tokens [d]."""
        padded = [tokens[0], tokens[0], *tokens]
        three = padded[-3:]
        ngram = self.config.get("ngram", 3)
        three = [*[three[-ngram]] * (3 - ngram), *three[-ngram:]]
        x = self.embeddings[three].flatten()
        x = x + silu(x @ self.w["trimlp.0.linear.weight"].T + self.w["trimlp.0.linear.bias"])
        return x @ self.w["trimlp.1.weight"].T

    def surrogate(self, states: Tensor, trigram: Tensor) -> Tensor:
        """What comes out at a trigram [d] behind states [n, d], true ones and surrogates."""
        w, x = self.w, torch.cat((states, trigram[None]))
        x = (x + self.attention(normed(x, w["layers.0.input_layernorm.weight"])))[-1]
        h = normed(x, w["layers.0.post_attention_layernorm.weight"])
        gate, up, down = (w[f"layers.0.mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
        return x + (silu(h @ gate.T) * (h @ up.T)) @ down.T

    @torch.inference_mode()
    def logits(self, text: Sequence[int], guesses: Sequence[int]) -> Tensor:
        """[1 + guesses, V]: what follows the text, and each guess after it."""
        states, tokens = self.features(text[:-1]), list(text)
        last, found = states[-1], []
        heads = sum(name.startswith("chimera_head.") for name in self.w)
        for depth, guess in enumerate((*guesses, None)):
            stand_in = self.surrogate(states, self.trigram(tokens))
            read = torch.cat((last, stand_in)) @ self.w[f"chimera_head.{min(depth, heads - 1)}.0.weight"].T
            found.append(oracle.unembedded(self.target, read) if self.config.get("original_lm_head") else read)
            if guess is not None:
                states = torch.cat((states, stand_in[None]))
                tokens.append(guess)
        return torch.stack(found)
