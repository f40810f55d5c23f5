"""Chimera's heads as files: with the names of the authors' code, or in vLLM's `speculators` manner."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from phasewise.errors import UserError
from phasewise.model.config import ModelConfig
from phasewise.model.model import Model
from phasewise.speculation.heads.fitting import filled, on_paper, other_width
from phasewise.speculation.heads.folder import CONFIG, StoredHeads
from phasewise.speculation.heads.layers import plain_layer
from phasewise.speculation.heads.trigram import GRAM, TrigramHeads, TrigramOptions

SIGN = "trimlp.1.weight"  # a tensor that no other heads have
THEIRS, OURS = "fast_layer1.0.", "layers.0."  # beginnings of the layer's tensors
MOST = 64  # output heads


# ---- reading
def chimera(stored: StoredHeads, config: ModelConfig, tensors: Mapping[str, Tensor], model: Model) -> TrigramHeads:
    """The heads of these tensors, for a model that they must fit. Raises UserError."""
    if config.hidden != model.config.hidden:
        raise other_width(stored, f"hidden_size={config.hidden}", model)
    held = {f"{OURS}{name[len(THEIRS) :]}" if name.startswith(THEIRS) else name: each for name, each in tensors.items()}
    heads, ngram = stored.number("chimera_num_heads", _heads(held)), stored.number("ngram", GRAM)
    if not 1 <= heads <= MOST:
        raise UserError(f"{stored.path / CONFIG}: chimera_num_heads={heads} must be from 1 to {MOST}")
    if not 1 <= ngram <= GRAM:
        raise UserError(f"{stored.path / CONFIG}: ngram={ngram} must be from 1 to {GRAM}")
    options = TrigramOptions(heads, not stored.config.get("original_lm_head", False), ngram)
    return filled(on_paper(lambda: TrigramHeads(config, options)), held, stored)


def _heads(tensors: Mapping[str, Tensor]) -> int:
    """The number of output heads, by names of tensors; 1 where there is none, which is missed then."""
    return max(1, sum(name.startswith("chimera_head.") for name in tensors))


# ---- making
def usual_chimera(model: Model, *, narrow: bool = False, options: TrigramOptions | None = None) -> TrigramHeads:
    """Untrained heads. `narrow`: a layer with one key head and an MLP half as wide as the model."""
    return TrigramHeads(plain_layer(model, narrow=narrow), options or TrigramOptions())


# ---- writing
def chimera_settings(heads: TrigramHeads) -> dict[str, Any]:
    """The entries of config.json that these heads alone have."""
    options = heads.options
    return {
        "architectures": ["ChimeraSpeculator"], "chimera_num_heads": options.heads, "ngram": options.ngram,
        "original_lm_head": not options.own_output,
    }  # fmt: skip
