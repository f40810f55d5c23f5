"""FSPAD's heads as tiny files of each layout, and their forward written a second time in plain torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from tests import oracle, tiny
from tests.speculation.eagle_files import INNER, Plain, block, matrices, normed, save, settings


def fspad(
    path: Path, d: int, *, bias: bool = True, embeddings: bool = False, names: str = "own", seed: int = 1
) -> Path:
    """The authors' layout, or that of `speculators`. Of the block's output the first half is for the output head."""
    tensors = block(seed, "layers.0", d, d)
    tensors |= matrices(
        seed + 1, fc__fc__weight=(d, 2 * d), fc__mlp__gate_proj__weight=(INNER, d), fc__mlp__up_proj__weight=(INNER, d),
        fc__mlp__down_proj__weight=(d, INNER), fc__post_attention_layernorm__weight=(d,),
        layers__0__mlp__down_proj__weight=(2 * d, INNER),
    )  # fmt: skip
    if bias:
        tensors["fc.fc.bias"] = torch.randn(d, generator=torch.Generator().manual_seed(seed)) * 0.1
    if embeddings:
        tensors |= matrices(seed + 2, embed_tokens__weight=(tiny.VOCAB, d))
    layer: dict[str, Any] = settings(d, architectures=["LlamaForCausalLM"])
    if names == "speculators":
        layer = {"speculators_model_type": "fspad", "transformer_layer_config": layer}
    return save(path, layer, tensors)


class PlainFspad(Plain):
    """The heads of a folder beside the target of another, without a cache. `returned`: the half of an output that is
    passed on, 1 as the paper has it."""

    def __init__(self, folder: Path, target: Path, returned: int = 1) -> None:
        super().__init__(folder, target)
        self.returned = returned

    def run(self, embedded: Tensor, features: Tensor) -> Tensor:
        """Outputs [n, 2 d] of n pairs, each of which sees those before it."""
        w = self.w
        u = torch.cat((embedded, features), -1) @ w["fc.fc.weight"].T + w.get("fc.fc.bias", torch.zeros(1))
        gate = silu(embedded @ w["fc.mlp.gate_proj.weight"].T)
        up = normed(u, w["fc.post_attention_layernorm.weight"]) @ w["fc.mlp.up_proj.weight"].T
        u = u + (gate * up) @ w["fc.mlp.down_proj.weight"].T
        v = u + self.attention(u)
        h = normed(v, w["layers.0.post_attention_layernorm.weight"])
        gate, up, down = (w[f"layers.0.mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
        for_head, for_feature = ((silu(h @ gate.T) * (h @ up.T)) @ half.T for half in down.chunk(2))
        return torch.cat((v + for_head, v + for_feature), -1)

    @torch.inference_mode()
    def logits(self, text: Sequence[int], guesses: Sequence[int]) -> Tensor:
        """[1 + guesses, V]: what follows the text, and each guess after it."""
        features, embedded = self.features(text[:-1]), self.embeddings[list(text[1:])]
        found = []
        for guess in (*guesses, None):
            halves = self.run(embedded, features)[-1].chunk(2)
            found.append(oracle.unembedded(self.target, halves[0]))
            if guess is not None:
                features = torch.cat((features, halves[self.returned][None]))
                embedded = torch.cat((embedded, self.embeddings[guess][None]))
        return torch.stack(found)
