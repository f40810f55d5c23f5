"""MTP modules: a whole layer that is trained with the model, and goes on with its states (arXiv 2412.19437).

Module names are those of vLLM's `speculators`. Checkpoints that carry the module call it otherwise: Qwen3-Next's begin
with `mtp.`; DeepSeek-V3's parts have names of their own behind `model.layers.LAYERS.`; MiMo's lie behind
`model.mtp_layers.0.`, and its projection reads the state before the embedding (`own_tensors`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import ClassVar, cast

import torch
from torch import Tensor, nn

from phasewise.model.config import ModelConfig
from phasewise.speculation.heads.block import AttendRows, Block, BlockNorm, FeatureHeads

BLOCK = "mtp_layers.0."
IN_CHECKPOINTS = {  # beginnings of names
    "mtp.fc.": "input_proj.",
    "mtp.pre_fc_norm_embedding.": "token_layernorm.",
    "mtp.pre_fc_norm_hidden.": "hidden_layernorm.",
    "mtp.norm.": "final_layernorm.",
    "mtp.layers.0.": "",
    "eh_proj.": "input_proj.",
    "enorm.": "token_layernorm.",
    "hnorm.": "hidden_layernorm.",
    "shared_head.norm.": "final_layernorm.",
}
STATE_FIRST = "model.mtp_layers."  # names of modules whose projection reads the state, then the embedding
SHARED = ("embed_tokens.weight", "shared_head.head.weight", "lm_head.weight")  # copies of the model's own


def own_tensors(stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a module by its own names, whatever a checkpoint calls them."""
    found = {new: tensor for name, tensor in stored.items() if (new := renamed(name)) is not None}
    projection = f"{BLOCK}input_proj.weight"
    if projection in found and any(name.startswith(STATE_FIRST) for name in stored):
        found[projection] = found[projection].roll(found[projection].shape[-1] // 2, -1)
    return found


def renamed(name: str) -> str | None:
    """The module's name of a tensor; None for a copy of the model's own, which is not read."""
    short = re.sub(r"^model\.(layers\.\d+|mtp_layers\.0)\.", "", name)
    if short in SHARED:
        return None
    for theirs, ours in IN_CHECKPOINTS.items():
        if short.startswith(theirs):
            return BLOCK + ours + short.removeprefix(theirs)
    return short if short.startswith(BLOCK) else BLOCK + short


class MTPBlock(Block):
    """Embedding and feature, each after a norm of its own, are projected to one row, which a whole layer reads."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config, config.hidden)
        self.token_layernorm = BlockNorm(config.hidden, config.eps)
        self.hidden_layernorm = BlockNorm(config.hidden, config.eps)
        self.input_proj = nn.Linear(2 * config.hidden, config.hidden, bias=False)
        self.input_layernorm = BlockNorm(config.hidden, config.eps)
        self.final_layernorm = BlockNorm(config.hidden, config.eps)

    def forward(self, embedded: Tensor, feature: Tensor, attend: AttendRows) -> Tensor:
        x = self.input_proj(torch.cat((self.token_layernorm(embedded), self.hidden_layernorm(feature)), -1))
        return self.run(self.input_layernorm(x), x, attend)


class MTP(FeatureHeads):
    """One module, used again for each further token. The feature is the model's last state after its final norm, and so
    is what the module passes on, after a norm of its own; the model's output head reads it."""

    kind: ClassVar[str] = "mtp"

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.mtp_layers = nn.ModuleList([MTPBlock(config)])

    @property
    def block(self) -> MTPBlock:
        return cast(MTPBlock, self.mtp_layers[0])

    def forward(self, embedded: Tensor, feature: Tensor, attend: AttendRows) -> Tensor:
        out: Tensor = self.block(embedded, feature, attend)
        return out

    def passed_on(self, output: Tensor) -> Tensor:
        return self.final(output)

    def final(self, output: Tensor) -> Tensor:
        normed: Tensor = self.block.final_layernorm(output)
        return normed
