"""The prefix layer of Hydra++ as it lies in a folder of Hydra's heads."""

from __future__ import annotations

from phasewise.model.model import Model
from phasewise.speculation.heads.fitting import digest, filled, on_paper
from phasewise.speculation.heads.folder import StoredHeads
from phasewise.speculation.heads.hydra import PrefixLayer
from phasewise.speculation.heads.layers import LAYER, block_config, one_layer

PREFIX_LAYER = "prefix_layer."  # before the names of the layer's tensors


def prefix_layer(stored: StoredHeads, model: Model) -> tuple[PrefixLayer, str] | None:
    """The prefix layer in a folder of Hydra's heads, and a key that names it; None where they have none. Its sizes are
    those of the model's layers, unless `transformer_layer_config` says others. Raises UserError."""
    own = {name.removeprefix(PREFIX_LAYER): t for name, t in stored.tensors.items() if name.startswith(PREFIX_LAYER)}
    if not own:
        return None
    config = stored.config if LAYER in stored.config else one_layer(model)
    alone = StoredHeads(stored.path, config, own)
    sizes = block_config(alone, model)
    made = filled(on_paper(lambda: PrefixLayer(sizes)), own, alone)
    return made, f"hydra {digest(alone)}"
