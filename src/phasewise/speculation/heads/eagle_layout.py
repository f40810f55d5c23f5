"""EAGLE's heads as files: its own layout (github.com/SafeAILab/EAGLE), P-EAGLE's, and vLLM's `speculators`.

EAGLE's own has a Llama's config.json; its EAGLE-3 heads call their first layer `midlayer`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from phasewise.errors import UserError
from phasewise.model.config import ModelConfig
from phasewise.model.model import Model
from phasewise.speculation.heads.eagle import Eagle1, Eagle3, Eagle3Options, PEagle
from phasewise.speculation.heads.fitting import draft_vocabulary, filled, mask_of, on_paper, other_width
from phasewise.speculation.heads.folder import CONFIG, WEIGHTS, StoredHeads

FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


# ---- reading
def eagle1(stored: StoredHeads, config: ModelConfig, tensors: Mapping[str, Tensor], model: Model) -> Eagle1:
    """EAGLE-1's and EAGLE-2's heads of these tensors, for a model that they must fit. Raises UserError."""
    made = on_paper(lambda: Eagle1(config, bias="fc.bias" in tensors, embeddings="embed_tokens.weight" in tensors))
    if config.hidden != model.config.hidden:
        raise other_width(stored, f"hidden_size={config.hidden}", model)
    return filled(made, tensors, stored)


def eagle3(
    stored: StoredHeads, config: ModelConfig, tensors: Mapping[str, Tensor], model: Model, *, masked: bool
) -> Eagle3:
    """EAGLE-3's heads, or P-EAGLE's where they are `masked`. Raises UserError."""
    if (mask := tensors.get("mask_hidden")) is not None:
        tensors = {**tensors, "mask_hidden": mask.reshape(1, 1, -1)}  # files have one, two or three dimensions
    options = options_of(stored, config, tensors, model, masked)
    return filled(on_paper(lambda: (PEagle if masked else Eagle3)(config, options)), tensors, stored)


def options_of(
    stored: StoredHeads, config: ModelConfig, tensors: Mapping[str, Tensor], model: Model, masked: bool
) -> Eagle3Options:
    """What a folder says of EAGLE-3's heads. Raises UserError for what does not fit the tensors or the model."""
    said = stored.config
    own = "embed_tokens.weight" in tensors
    wide = said.get("target_hidden_size") or (model.config.hidden if own else config.hidden)
    if wide != model.config.hidden:
        raise other_width(stored, f"hidden_size={wide}", model)
    if config.hidden != model.config.hidden and not own:
        raise UserError(
            f"{stored.path}: heads of width {config.hidden} need embeddings of their own (embed_tokens.weight) for a "
            f"model of width {model.config.hidden}"
        )
    aux = taps_of(stored, model.config.layers)
    fc = tensors.get("fc.weight")
    if fc is not None and fc.ndim == 2 and fc.shape[1] != len(aux) * wide:
        raise UserError(
            f"{stored.path / WEIGHTS}: fc.weight reads {fc.shape[1]} numbers, but {len(aux)} taps of a model of width "
            f"{wide} give {len(aux) * wide}: these heads are of another width, or eagle_aux_hidden_state_layer_ids "
            "names too few layers or too many"
        )
    draft = draft_vocabulary(stored, config, tensors)
    flags = {flag: bool(said.get(flag, False)) for flag in FLAGS}
    mask = mask_of(stored, config, said) if masked else None
    return Eagle3Options(aux, wide, draft, embeddings=own, mask=mask, **flags)


def taps_of(stored: StoredHeads, layers: int) -> tuple[int, ...]:
    """The layers whose input a head's features are made of. Raises UserError for such as the model has not."""
    inner = stored.config.get("eagle_config")
    said = stored.config.get("eagle_aux_hidden_state_layer_ids")
    if said is None and isinstance(inner, dict):
        said = inner.get("eagle_aux_hidden_state_layer_ids")
    if said is None:
        said, why = list(published_taps(layers)), "the heads name none, and the published ones are"
    else:
        why = "the heads tap"
    good = isinstance(said, list) and said and all(isinstance(i, int) and 1 <= i <= layers for i in said)
    if not good:
        raise UserError(f"{stored.path / CONFIG}: {why} eagle_aux_hidden_state_layer_ids={said!r}, and the model has "
                        f"{layers} layers: each must be from 1 to {layers}")  # fmt: skip
    return tuple(said)


def published_taps(layers: int) -> tuple[int, int, int]:
    """The taps of published heads, which do not say: a low, a middle and a high layer."""
    return 2, layers // 2, layers - 3


# ---- making
def usual_taps(layers: int) -> tuple[int, int, int]:
    """The taps of heads made here: the published ones, or as far apart as a model of few layers has them."""
    return published_taps(layers) if layers >= 8 else (1, max(1, layers // 2), max(1, layers - 1))


def usual_options(model: Model, draft_vocab: int = 0, *, masked: bool = False) -> Eagle3Options:
    """Of heads made here. `draft_vocab`: tokens that they guess among; 0: all."""
    its = model.config
    mask = its.vocab - 1 if masked else None
    return Eagle3Options(usual_taps(its.layers), its.hidden, draft_vocab or its.vocab, mask=mask)


# ---- writing
def eagle3_settings(heads: Eagle3) -> dict[str, Any]:
    """What `speculators` says of EAGLE-3's heads alone."""
    its = heads.options
    made: dict[str, Any] = {
        "architectures": ["Eagle3Speculator"], "draft_vocab_size": its.draft_vocab,
        "target_hidden_size": its.target_hidden, "eagle_aux_hidden_state_layer_ids": list(its.aux),
    }  # fmt: skip
    made |= {flag: getattr(its, flag) for flag in FLAGS}
    if its.mask is not None:
        made |= {"architectures": ["PEagleSpeculator"], "mask_token_id": its.mask}
    return made
