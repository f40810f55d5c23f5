"""DFlash's heads as files: its own layout (github.com/z-lab/dflash) and vLLM's `speculators`.

DFlash's own has a Qwen 3's config.json with `dflash_config`, and numbers layers by their output.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from phasewise.errors import UserError
from phasewise.model.config import ModelConfig
from phasewise.model.model import Model
from phasewise.speculation.heads.dflash import DFlashHeads, DFlashOptions
from phasewise.speculation.heads.eagle_layout import usual_taps
from phasewise.speculation.heads.fitting import draft_vocabulary, filled, mask_of, on_paper, other_width
from phasewise.speculation.heads.folder import CONFIG, StoredHeads
from phasewise.speculation.heads.layers import LAYER, plain_layer, several

USUAL_BLOCK, LAYERS = 8, 2  # of heads that are made here: a token and seven masks


# ---- reading
def dflash(stored: StoredHeads, config: ModelConfig, tensors: Mapping[str, Tensor], model: Model) -> DFlashHeads:
    """DFlash's heads of these tensors, for a model that they must fit. Raises UserError."""
    said, inner = stored.config, stored.config.get("dflash_config", {})
    where = stored.path / CONFIG
    if not isinstance(inner, dict):
        raise UserError(f"{where}: dflash_config must be an object, got {inner!r}")
    if config.hidden != model.config.hidden:
        raise other_width(stored, f"hidden_size={config.hidden}", model)
    layers = said.get("num_target_layers", model.config.layers)
    if layers != model.config.layers:
        raise UserError(f"{stored.path}: these heads are for a model of {layers} layers (num_target_layers), the one "
                        f"in {model.files.path} has {model.config.layers}: give heads made for this model")  # fmt: skip
    if said.get("sample_from_anchor"):
        raise UserError(f"{where}: sample_from_anchor is not supported, where the first guess has no mask")
    if "sliding_attention" in (said.get(LAYER, said).get("layer_types") or ()):
        raise UserError(f"{where}: layers with a sliding window (layer_types) are not supported in DFlash's heads")
    aux = _dflash_taps(stored, inner, model.config.layers)
    block = said.get("block_size", inner.get("block_size"))
    if not isinstance(block, int) or block < 2:
        raise UserError(f"{where}: block_size={block!r} must be a whole number of at least 2: a token and masks")
    draft = draft_vocabulary(stored, config, tensors) if "lm_head.weight" in tensors else config.vocab
    options = DFlashOptions(
        aux, block, mask_of(stored, config, inner | said), draft, embeddings="embed_tokens.weight" in tensors,
        head="lm_head.weight" in tensors,
    )  # fmt: skip
    return filled(on_paper(lambda: DFlashHeads(config, options)), tensors, stored)


def _dflash_taps(stored: StoredHeads, inner: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    """The layers whose input features are made of. DFlash's own files number layers by their output, which is the input
    of the next. Raises UserError for such as the model has not."""
    key, said, least = "aux_hidden_state_layer_ids", stored.config.get("aux_hidden_state_layer_ids"), 1
    if said is None:
        key, said, least = "dflash_config.target_layer_ids", inner.get("target_layer_ids"), 0
    most = layers - 1 + least
    if not isinstance(said, list) or not said or not all(isinstance(i, int) and least <= i <= most for i in said):
        raise UserError(f"{stored.path / CONFIG}: {key}={said!r}, and the model has {layers} layers: each must be from "
                        f"{least} to {most}")  # fmt: skip
    return tuple(i + 1 - least for i in said)


# ---- making
def usual_dflash(model: Model, *, narrow: bool = False, guesses: int = 0) -> DFlashHeads:
    """Untrained heads of the usual shape. `narrow`: with MLPs half as wide as the model, but a key head for each query
    head: what masks know of the text comes through keys and values alone. `guesses`: of a pass; 0: as many as usual."""
    its, config = model.config, plain_layer(model, narrow=narrow)
    block = 1 + guesses if guesses else USUAL_BLOCK
    options = DFlashOptions(usual_taps(its.layers), block, its.vocab - 1, its.vocab)
    config = replace(several(config, LAYERS), qk_norm="head")
    return DFlashHeads(replace(config, kv_heads=config.heads) if narrow else config, options)


# ---- writing
def dflash_settings(heads: DFlashHeads) -> dict[str, Any]:
    """What `speculators` says of DFlash's heads alone."""
    its = heads.options
    return {
        "architectures": ["DFlashSpeculator"], "draft_vocab_size": its.draft_vocab, "block_size": its.block,
        "aux_hidden_state_layer_ids": list(its.aux), "mask_token_id": its.mask, "sample_from_anchor": False,
    }  # fmt: skip
