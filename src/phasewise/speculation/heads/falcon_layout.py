"""Falcon's heads as files: with the names of the authors' code, in their layout or in vLLM's `speculators` manner.

Both say `k_mask`: how many tokens a pass guesses.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from phasewise.errors import UserError
from phasewise.model.config import ModelConfig
from phasewise.model.model import Model
from phasewise.speculation.heads.falcon import FalconHeads
from phasewise.speculation.heads.fitting import filled, on_paper, other_width
from phasewise.speculation.heads.folder import CONFIG, StoredHeads
from phasewise.speculation.heads.layers import plain_layer

RECURRENT = "lstm.weight_ih_l0"  # a tensor that no other heads have
TOGETHER = "k_mask"  # the setting that says how many tokens a pass guesses
USUAL_TOGETHER, MOST_TOGETHER = 2, 16


# ---- reading
def falcon(stored: StoredHeads, config: ModelConfig, tensors: Mapping[str, Tensor], model: Model) -> FalconHeads:
    """The heads of these tensors, for a model that they must fit. Raises UserError."""
    if config.hidden != model.config.hidden:
        raise other_width(stored, f"hidden_size={config.hidden}", model)
    said = stored.config.get(TOGETHER)
    if isinstance(said, bool) or not isinstance(said, int) or not 1 <= said <= MOST_TOGETHER:
        raise UserError(f"{stored.path / CONFIG}: {TOGETHER}={said!r} must be a whole number from 1 to "
                        f"{MOST_TOGETHER}: the guesses of a pass")  # fmt: skip
    bias, own = "lstm.bias_ih_l0" in tensors, "embed_tokens.weight" in tensors
    return filled(on_paper(lambda: FalconHeads(config, said, bias=bias, embeddings=own)), tensors, stored)


# ---- making
def usual_falcon(model: Model, *, narrow: bool = False, guesses: int = 0) -> FalconHeads:
    """Untrained heads. `narrow`: with one key head and an MLP half as wide as the model. `guesses`: those of a
    pass; 0: two, the paper's best."""
    return FalconHeads(plain_layer(model, narrow=narrow), guesses or USUAL_TOGETHER)


# ---- writing
def falcon_settings(heads: FalconHeads) -> dict[str, Any]:
    """The entries of config.json that these heads alone have."""
    return {"architectures": ["FalconSpeculator"], TOGETHER: heads.together}
