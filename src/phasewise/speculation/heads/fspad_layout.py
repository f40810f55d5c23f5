"""FSPAD's heads as files: with the names of the authors' code, in their layout or in vLLM's `speculators` manner."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from phasewise.model.config import ModelConfig
from phasewise.model.model import Model
from phasewise.speculation.heads.fitting import filled, on_paper, other_width
from phasewise.speculation.heads.folder import StoredHeads
from phasewise.speculation.heads.fspad import Fspad
from phasewise.speculation.heads.layers import plain_layer

SIGN = "fc.mlp.gate_proj.weight"  # a tensor that no other heads have
NARROW = 3, 8  # of the model's width: an MLP's where heads are to be small, as they have two


# ---- reading
def fspad(stored: StoredHeads, config: ModelConfig, tensors: Mapping[str, Tensor], model: Model) -> Fspad:
    """The heads of these tensors, for a model that they must fit. Raises UserError."""
    if config.hidden != model.config.hidden:
        raise other_width(stored, f"hidden_size={config.hidden}", model)
    bias, own = "fc.fc.bias" in tensors, "embed_tokens.weight" in tensors
    return filled(on_paper(lambda: Fspad(config, bias=bias, embeddings=own)), tensors, stored)


# ---- making
def usual_fspad(model: Model, *, narrow: bool = False) -> Fspad:
    """Untrained heads. `narrow`: with one key head, and MLPs three eighths as wide as the model."""
    config = plain_layer(model, narrow=narrow)
    if narrow:
        config = replace(config, intermediate=config.hidden * NARROW[0] // NARROW[1])
    return Fspad(config)


# ---- writing
def fspad_settings() -> dict[str, Any]:
    """What is said of these heads alone."""
    return {"architectures": ["FspadSpeculator"]}
