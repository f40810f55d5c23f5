"""MTP modules as files: vLLM's `speculators`, and what a model's own checkpoint carries (`model/modules.py`)."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from phasewise.errors import UserError
from phasewise.model.config import ModelConfig
from phasewise.model.model import Model
from phasewise.model.modules import module_count, module_tensors
from phasewise.speculation.heads.fitting import filled, on_paper, other_width
from phasewise.speculation.heads.folder import StoredHeads, beside
from phasewise.speculation.heads.layers import one_layer
from phasewise.speculation.heads.mtp import MTP, own_tensors


def mtp(stored: StoredHeads, config: ModelConfig, tensors: Mapping[str, Tensor], model: Model) -> MTP:
    """The module of these tensors, for a model that it must fit. Raises UserError."""
    if config.hidden != model.config.hidden:
        raise other_width(stored, f"hidden_size={config.hidden}", model)
    return filled(on_paper(lambda: MTP(config)), own_tensors(tensors), stored)


def carried_module(model: Model) -> StoredHeads | None:
    """The MTP module in a model's own checkpoint, whose tensors stay where they are; None if there is none, or if
    another lies beside the model. Raises UserError where there are several."""
    tensors = model.files.tensors()
    names = module_tensors(tensors.where)
    if not names or beside(model, "mtp").is_dir():
        return None
    if (count := module_count(names)) > 1:
        raise UserError(f"{model.files.path} carries {count} MTP modules, one for each further token, and one is "
                        "supported: name a folder with one (heads=DIR), or choose another drafter")  # fmt: skip
    return StoredHeads(model.files.path, one_layer(model), {name: tensors.read(name) for name in names})
