"""Layouts of published heads: which kind a folder holds, and how its names and settings are read and written.

Each family has a file of its own (`eagle_layout.py` and so on), with the layout of its authors and vLLM's
`speculators` (github.com/vllm-project/speculators). The latter names the kind `speculators_model_type` and keeps the
settings of layers in `transformer_layer_config` (`layers.py`). It is what phasewise writes, so that others can load it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from phasewise.errors import UserError, near
from phasewise.model.config import ModelConfig
from phasewise.model.model import Model
from phasewise.model.modules import module_tensors
from phasewise.speculation.heads.block import FeatureHeads
from phasewise.speculation.heads.chimera_layout import SIGN as TRIGRAM
from phasewise.speculation.heads.chimera_layout import chimera, chimera_settings, usual_chimera
from phasewise.speculation.heads.clover import CloverHeads
from phasewise.speculation.heads.clover_layout import clover, clover_settings, usual_clover
from phasewise.speculation.heads.dflash import DFlashHeads
from phasewise.speculation.heads.dflash_layout import dflash, dflash_settings, usual_dflash
from phasewise.speculation.heads.eagle import Eagle1, Eagle3, PEagle
from phasewise.speculation.heads.eagle_layout import eagle1, eagle3, eagle3_settings, usual_options
from phasewise.speculation.heads.exit import ExitAdapter
from phasewise.speculation.heads.exit_layout import exit_adapter, exit_settings, usual_exit_adapter
from phasewise.speculation.heads.falcon import FalconHeads
from phasewise.speculation.heads.falcon_layout import RECURRENT, falcon, falcon_settings, usual_falcon
from phasewise.speculation.heads.fitting import digest, named, same_base
from phasewise.speculation.heads.folder import AUTO, CONFIG, WEIGHTS, StoredHeads, locate, read, seed_of
from phasewise.speculation.heads.fspad import Fspad
from phasewise.speculation.heads.fspad_layout import SIGN, fspad, fspad_settings, usual_fspad
from phasewise.speculation.heads.hydra_layout import prefix_layer as prefix_layer
from phasewise.speculation.heads.layers import LAYER, block_config, layer_settings, plain_layer
from phasewise.speculation.heads.mtp import MTP
from phasewise.speculation.heads.mtp_layout import carried_module, mtp
from phasewise.speculation.heads.trigram import TrigramHeads

SAID = "speculators_model_type"
# kinds that a folder may hold, and the drafter that reads them
DRAFTERS = {
    "eagle1": "eagle", "eagle3": "eagle", "peagle": "eagle", "dflash": "dflash", "medusa": "medusa", "mtp": "mtp",
    "hydra": "hydra", "hydra_plus": "hydra", "kangaroo": "kangaroo", "fspad": "fspad",
    "hidden_transfer": "hidden_transfer", "masked_mtp": "masked_mtp", "ppd": "ppd",
    "chimera": "chimera", "clover": "clover", "diffuspec": "diffuspec", "falcon": "falcon",
}  # fmt: skip
PLAIN: dict[str, Callable[[ModelConfig], FeatureHeads]] = {"eagle1": Eagle1, "mtp": MTP}  # made of a layer alone
READERS: dict[str, Callable[[StoredHeads, ModelConfig, Mapping[str, Tensor], Model], FeatureHeads]] = {
    "chimera": chimera,
    "clover": clover,
    "dflash": dflash,
    "falcon": falcon,
    "fspad": fspad,
    "kangaroo": exit_adapter,
    "mtp": mtp,
}
SINGLE = ("chimera", "eagle1", "falcon", "fspad", "kangaroo", "mtp")  # kinds of one layer


# ---- reading
def kind_of(stored: StoredHeads) -> str:
    """The kind of the heads in a folder. Raises UserError for one that nothing here reads."""
    config = stored.config
    said = config.get(SAID) or (config.get("model_type") if config.get("model_type") in DRAFTERS else None)
    if said is not None:
        if said not in DRAFTERS:
            raise UserError(f"{stored.path / CONFIG}: {SAID}={said!r} is not supported. {near(str(said), DRAFTERS)}")
        return str(said)
    kind = _told_by_layout(stored)
    if kind is not None:
        return kind
    raise UserError(
        f"{stored.path} holds no heads of a known kind: {CONFIG} has no {SAID}, and {WEIGHTS} no fc.weight. "
        f"Known kinds: {', '.join(sorted(DRAFTERS))}."
    )


def _told_by_layout(stored: StoredHeads) -> str | None:
    """The kind that keys of the configuration and names of tensors tell, where none is named."""
    config, tensors, names = stored.config, stored.tensors, str(stored.config.get("architectures"))
    signs = {
        "dflash": "dflash_config" in config or "DFlash" in names,
        "peagle": "mask_hidden" in tensors,
        "eagle3": "Eagle3" in names or "draft_vocab_size" in config or any(x.startswith("midlayer.") for x in tensors),
        "mtp": bool(module_tensors(tensors)) or "eh_proj.weight" in tensors,
        "chimera": TRIGRAM in tensors,
        "falcon": RECURRENT in tensors,
        "fspad": SIGN in tensors,
        "eagle1": "fc.weight" in tensors,
    }
    return next((kind for kind, seen in signs.items() if seen), None)


def feature_heads(model: Model, kinds: Sequence[str], heads: str) -> tuple[FeatureHeads, str]:
    """The heads of one of these kinds for a model, and a key that names them.

    `heads`: auto (of the first kind that lies beside the model, that its checkpoint carries, or that is shipped for
    it), a folder, or random:SEED, which makes some of the first kind. Raises UserError naming what does not fit, or
    Untrained.
    """
    seed = seed_of(heads)
    if seed is not None:
        return random_heads(kinds[0], model, seed), f"{kinds[0]} {heads}"
    stored = None if heads != AUTO or "mtp" not in kinds else carried_module(model)
    stored = stored or read(locate(model, kinds, heads))
    kind = kind_of(stored)
    if kind not in kinds:
        raise UserError(
            f"{stored.path} holds heads of kind {kind}: choose --draft {DRAFTERS[kind]}:heads={stored.path}"
        )
    return load(stored, model, kind), f"{kind} {digest(stored)}"


def load(stored: StoredHeads, model: Model, kind: str) -> FeatureHeads:
    """The heads of a folder, float32 or as stored, for a model that they must fit. Raises UserError."""
    same_base(stored, model, kind)
    config, tensors = block_config(stored, model), named(stored)
    if config.layers != 1 and kind in SINGLE:
        raise UserError(f"{stored.path / CONFIG}: num_hidden_layers={config.layers}: heads of kind {kind} have one")
    if kind in READERS:
        return READERS[kind](stored, config, tensors, model)
    if kind in ("eagle3", "peagle"):
        return eagle3(stored, config, tensors, model, masked=kind == "peagle")
    return eagle1(stored, config, tensors, model)


# ---- making
def random_heads(kind: str, model: Model, seed: int) -> FeatureHeads:
    """Heads of the usual shape for a model with normal weights of variance 1 / columns: nothing learned, but at
    work."""
    made = untrained(kind, model)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in made.named_parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5, generator=generator)
        elif "bias" in name:
            nn.init.zeros_(parameter)
    return made


def untrained(
    kind: str, model: Model, *, narrow: bool = False, draft_vocab: int = 0, guesses: int = 0, exit: int = 0
) -> FeatureHeads:
    """Heads of the usual shape for a model: a plain Llama's block of its widths. `narrow`: with one key head and an MLP
    half as wide as the model, FSPAD's two a little less. `draft_vocab`: tokens that an EAGLE-3 head knows; 0: all.
    `guesses`: those of a pass of DFlash's heads or Falcon's, or of Clover's in a row; 0: as many as usual. `exit`: the
    model's layers before an adapter; 0: the usual number."""
    config = plain_layer(model, narrow=narrow)
    usual: dict[str, Callable[[], FeatureHeads]] = {
        "chimera": lambda: usual_chimera(model, narrow=narrow),
        "clover": lambda: usual_clover(model, guesses),
        "dflash": lambda: usual_dflash(model, narrow=narrow, guesses=guesses),
        "falcon": lambda: usual_falcon(model, narrow=narrow, guesses=guesses),
        "fspad": lambda: usual_fspad(model, narrow=narrow),
        "kangaroo": lambda: usual_exit_adapter(model, narrow=narrow, exit=exit),
        "peagle": lambda: PEagle(config, usual_options(model, masked=True)),
    }
    if kind in PLAIN:
        return PLAIN[kind](config)
    if kind in usual:
        return usual[kind]()
    return Eagle3(config, usual_options(model, draft_vocab))


# ---- writing
def settings_of(heads: FeatureHeads, model: Model, tokens: int) -> dict[str, Any]:
    """config.json of heads for a model in the layout of `speculators`; `tokens`: how many are guessed in a row."""
    raw, proposal = model.files.settings(), {"proposal_type": "greedy", "speculative_tokens": tokens}
    made: dict[str, Any] = {
        SAID: heads.kind,
        "speculators_config": {
            "algorithm": heads.kind, "default_proposal_method": "greedy", "proposal_methods": [proposal],
            "verifier": {"name_or_path": model.files.path.name, "architectures": raw.get("architectures", [])},
        },
        LAYER: layer_settings(heads.config, model),
    }  # fmt: skip
    if isinstance(heads, Eagle3):
        made |= eagle3_settings(heads)
    if isinstance(heads, DFlashHeads):
        made |= dflash_settings(heads)
    if isinstance(heads, ExitAdapter):
        made |= exit_settings(heads)
    if isinstance(heads, Fspad):
        made |= fspad_settings()
    if isinstance(heads, FalconHeads):
        made |= falcon_settings(heads)
    if isinstance(heads, TrigramHeads):
        made |= chimera_settings(heads)
    if isinstance(heads, CloverHeads):
        made |= clover_settings(heads)
    return made


def tensors_of(heads: FeatureHeads) -> dict[str, Tensor]:
    """The tensors of heads as they are stored: with `t2d` beside `d2t`."""
    found = dict(heads.state_dict())
    if heads.d2t is not None:
        t2d = torch.zeros(heads.config.vocab, dtype=torch.bool)
        t2d[heads.draft_ids().cpu()] = True
        found["t2d"] = t2d
    return found
