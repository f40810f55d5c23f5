"""Kangaroo's adapters as files: one layer behind the model's first `exit_layer` layers, in vLLM's `speculators`
manner."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from phasewise.errors import UserError
from phasewise.model.config import ModelConfig
from phasewise.model.model import Model
from phasewise.speculation.heads.exit import ExitAdapter
from phasewise.speculation.heads.fitting import filled, on_paper, other_width
from phasewise.speculation.heads.folder import CONFIG, StoredHeads
from phasewise.speculation.heads.layers import plain_layer

EXIT = "exit_layer"  # so many of the model's layers make an adapter's rows


# ---- reading
def exit_adapter(stored: StoredHeads, config: ModelConfig, tensors: Mapping[str, Tensor], model: Model) -> ExitAdapter:
    """The adapter of these tensors, for a model that it must fit. Raises UserError."""
    if config.hidden != model.config.hidden:
        raise other_width(stored, f"hidden_size={config.hidden}", model)
    depth, layers = stored.number(EXIT), model.config.layers
    if not 0 < depth < layers:
        raise UserError(f"{stored.path / CONFIG}: {EXIT}={depth}, and the model has {layers} layers: it must be from 1 "
                        f"to {layers - 1}")  # fmt: skip
    return filled(on_paper(lambda: ExitAdapter(config, depth)), tensors, stored)


# ---- making
def usual_exit_adapter(model: Model, *, narrow: bool = False, exit: int = 0) -> ExitAdapter:
    """An untrained adapter. `narrow`: with an MLP half as wide as the model, but a key head for each query head, as
    published. `exit`: the model's layers before it; 0: a sixteenth of all, as published, and no fewer than one."""
    config = plain_layer(model, narrow=narrow)
    depth = exit or max(1, round(model.config.layers / 16))
    return ExitAdapter(replace(config, kv_heads=config.heads), depth)


# ---- writing
def exit_settings(heads: ExitAdapter) -> dict[str, Any]:
    """What is said of an adapter alone."""
    return {"architectures": ["KangarooSpeculator"], EXIT: heads.exit}
