"""Hidden Transfer's maps as files. The paper's authors have published none, so the layout is phasewise's own:
`maps.I.weight` [hidden, hidden], and in the configuration `num_maps` and `transfer_layer`, the model's layers before
them."""

from __future__ import annotations

from typing import Any

from phasewise.errors import UserError
from phasewise.model.model import Model
from phasewise.speculation.heads.folder import CONFIG, check, locate, read, seed_of
from phasewise.speculation.heads.hidden_transfer import TransferMaps
from phasewise.speculation.heads.last_state import UNMEASURED, accuracy_of, random_weights

KIND = TransferMaps.kind
MAPS = 3  # where nobody says how many
LAYER = "transfer_layer"


# ---- reading
def transfer_maps(model: Model, heads: str) -> tuple[TransferMaps, list[list[float]]]:
    """The maps for a model, float32, and how often each rank of each map's guess is right where the guesses before it
    were. `heads`: auto, a folder, or random:SEED. Raises UserError naming what does not fit, or Untrained."""
    seed, layers = seed_of(heads), model.config.layers
    if layers < 2:
        raise UserError(f"{KIND}: the model in {model.files.path} has {layers} layer; maps stand between two")
    if seed is not None:
        made = usual_maps(model)
        random_weights(made, seed)
        return made, [[*UNMEASURED] for _ in made.maps]
    stored = read(locate(model, (KIND,), heads))
    said = stored.config.get("speculators_model_type")
    if said != KIND:
        raise UserError(f"{stored.path} holds heads of kind {said!r}, and --draft {KIND} reads {KIND!r}")
    check(stored, model, KIND)
    maps, layer = stored.number("num_maps"), stored.number(LAYER)
    if not maps:
        raise UserError(f"{stored.path / CONFIG}: num_maps=0: there must be at least one map")
    if not 0 < layer < layers:
        raise UserError(f"{stored.path / CONFIG}: {LAYER}={layer}, and the model has {layers} layers: it must be from "
                        f"1 to {layers - 1}")  # fmt: skip
    made = TransferMaps(model.config.hidden, maps, layer, layers)
    made.load_state_dict(stored.take({name: tuple(value.shape) for name, value in made.state_dict().items()}))
    return made, [[*row] for row in accuracy_of(stored, maps)]


# ---- making
def usual_maps(model: Model, maps: int = MAPS, layer: int = 0) -> TransferMaps:
    """Untrained maps for a model. `layer`: the layers before them; 0: half of the model's."""
    layers = model.config.layers
    return TransferMaps(model.config.hidden, maps, layer or max(1, layers // 2), layers)


# ---- writing
def transfer_settings(made: TransferMaps, model: Model) -> dict[str, Any]:
    """config.json of maps for a model."""
    return {
        "architectures": ["HiddenTransferSpeculator"], "model_type": KIND, "speculators_model_type": KIND,
        "hidden_size": model.config.hidden, "vocab_size": model.config.vocab, "num_maps": made.depth,
        LAYER: made.layer,
    }  # fmt: skip
