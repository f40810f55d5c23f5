"""Layouts of published heads: which kind a folder holds, and how its names and settings are read and written.

Four layouts are read. EAGLE's own (github.com/SafeAILab/EAGLE) has a Llama's config.json; its EAGLE-3 heads call their
layer `midlayer`. DFlash's own (github.com/z-lab/dflash) has a Qwen 3's config.json with `dflash_config`. A checkpoint
may carry a module itself (`model/modules.py`). vLLM's `speculators` (github.com/vllm-project/speculators) names the
kind `speculators_model_type` and keeps the settings of layers in `transformer_layer_config`. What phasewise writes is
the latter, so that others can load it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from phasewise.errors import UserError, near
from phasewise.model.artefacts import fingerprint
from phasewise.model.config import ModelConfig
from phasewise.model.model import Model
from phasewise.model.modules import module_count, module_tensors
from phasewise.model.parse import parse_config
from phasewise.model.raw import RawConfig
from phasewise.speculation.heads.block import FeatureHeads
from phasewise.speculation.heads.dflash import DFlashHeads, DFlashOptions
from phasewise.speculation.heads.eagle import Eagle1, Eagle3, Eagle3Options, PEagle
from phasewise.speculation.heads.folder import (
    AUTO,
    CONFIG,
    WEIGHTS,
    StoredHeads,
    beside,
    locate,
    read,
    seed_of,
    train_command,
)
from phasewise.speculation.heads.hydra import PrefixLayer
from phasewise.speculation.heads.mtp import MTP, own_tensors

T = TypeVar("T", bound=FeatureHeads)
SAID = "speculators_model_type"
LAYER = "transformer_layer_config"
# kinds that a folder may hold, and the drafter that reads them
DRAFTERS = {
    "eagle1": "eagle", "eagle3": "eagle", "peagle": "eagle", "dflash": "dflash", "medusa": "medusa", "mtp": "mtp",
    "hydra": "hydra", "hydra_plus": "hydra",
}  # fmt: skip
# what a block's settings leave out where they are as transformers has them
USUAL: dict[str, dict[str, Any]] = {
    "llama": {
        "hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32, "num_hidden_layers": 32,
        "vocab_size": 32000, "max_position_embeddings": 2048,
    },
    "qwen3": {
        "hidden_size": 4096, "intermediate_size": 22016, "num_attention_heads": 32, "num_key_value_heads": 32,
        "num_hidden_layers": 32, "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 32768,
    },
}  # fmt: skip
PREFIX_LAYER = "prefix_layer."  # before the names of Hydra++'s prefix layer, in a folder of Hydra's heads
SINGLE = ("eagle1", "mtp")  # kinds of one layer
OFTEN = ("rotary_emb.inv_freq",)  # endings of tensors that follow from the settings
UNREAD = ("t2d", "verifier_lm_head.weight", "verifier_norm.weight")  # for training; `t2d` is checked
USUAL_BLOCK, DFLASH_LAYERS = 8, 2  # of DFlash's heads that are made here: a token and seven masks
ROPE = ("rope_theta", "rope_scaling", "rope_parameters")
MASKS = ("mask_token_id", "ptd_token_id", "pard_token")  # settings that name the token of a mask
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


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
    return load(stored, model, kind), f"{kind} {_digest(stored)}"


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
    return StoredHeads(model.files.path, _one_layer(model), {name: tensors.read(name) for name in names})


def _one_layer(model: Model) -> dict[str, Any]:
    """A model's own settings, with one layer."""
    return {**model.files.settings().values, "num_hidden_layers": 1, "layer_types": None}


def prefix_layer(stored: StoredHeads, model: Model) -> tuple[PrefixLayer, str] | None:
    """The prefix layer in a folder of Hydra's heads, and a key that names it; None where they have none. Its sizes are
    those of the model's layers, unless `transformer_layer_config` says others. Raises UserError."""
    own = {name.removeprefix(PREFIX_LAYER): t for name, t in stored.tensors.items() if name.startswith(PREFIX_LAYER)}
    if not own:
        return None
    config = stored.config if LAYER in stored.config else _one_layer(model)
    alone = StoredHeads(stored.path, config, own)
    sizes = block_config(alone, model)
    made = _filled(_on_paper(lambda: PrefixLayer(sizes)), own, alone)
    return made, f"hydra {_digest(alone)}"


def load(stored: StoredHeads, model: Model, kind: str) -> FeatureHeads:
    """The heads of a folder, float32 or as stored, for a model that they must fit. Raises UserError."""
    _same_base(stored, model, kind)
    config = block_config(stored, model)
    tensors = _named(stored)
    if config.layers != 1 and kind in SINGLE:
        raise UserError(f"{stored.path / CONFIG}: num_hidden_layers={config.layers}: heads of kind {kind} have one")
    if kind == "dflash":
        return _filled(_dflash(stored, config, tensors, model), tensors, stored)
    if kind == "mtp":
        if config.hidden != model.config.hidden:
            raise _other_width(stored, f"hidden_size={config.hidden}", model)
        return _filled(_on_paper(lambda: MTP(config)), own_tensors(tensors), stored)
    if kind in ("eagle3", "peagle"):
        if (mask := tensors.get("mask_hidden")) is not None:
            tensors["mask_hidden"] = mask.reshape(1, 1, -1)  # files have one, two or three dimensions
        return _filled(_eagle3(stored, config, tensors, model, kind), tensors, stored)
    made = _on_paper(lambda: Eagle1(config, bias="fc.bias" in tensors, embeddings="embed_tokens.weight" in tensors))
    if config.hidden != model.config.hidden:
        raise _other_width(stored, f"hidden_size={config.hidden}", model)
    return _filled(made, tensors, stored)


def block_config(stored: StoredHeads, model: Model) -> ModelConfig:
    """The architecture of the layers, with the target's vocabulary. Raises UserError for what is not supported."""
    values = dict(stored.config)
    if LAYER in values:
        nested = values[LAYER]
        if not isinstance(nested, dict):
            raise UserError(f"{stored.path / CONFIG}: {LAYER} must be an object, got {nested!r}")
        family = str(nested.get("model_type", "qwen3"))
        values = {**USUAL.get(family, {}), "num_hidden_layers": 1, **nested, "model_type": family}
    values.setdefault("model_type", "llama")
    values.setdefault("num_hidden_layers", 1)
    values.setdefault("max_position_embeddings", model.config.max_positions)
    values["architectures"] = []
    config = parse_config(RawConfig(values, stored.path / CONFIG))
    if config.moe[0] is not None or config.norm_offset or config.qk_norm == "full" or config.rope_of[0] is None:
        raise UserError(
            f"{stored.path / CONFIG}: a block of model_type {config.family!r} is not supported, one of a Llama or a "
            "Qwen 3 is"
        )
    if config.vocab != model.config.vocab:
        raise UserError(
            f"{stored.path}: these heads are for a model with vocab_size={config.vocab}, the one in {model.files.path} "
            f"has {model.config.vocab}: give heads made for the same tokenizer"
        )
    return config


def _eagle3(stored: StoredHeads, config: ModelConfig, tensors: Mapping[str, Tensor], model: Model, kind: str) -> Eagle3:
    said = stored.config
    own = "embed_tokens.weight" in tensors
    wide = said.get("target_hidden_size") or (model.config.hidden if own else config.hidden)
    if wide != model.config.hidden:
        raise _other_width(stored, f"hidden_size={wide}", model)
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
    draft = _draft_vocabulary(stored, config, tensors)
    flags = {flag: bool(said.get(flag, False)) for flag in FLAGS}
    masked = kind == "peagle"
    mask = _mask(stored, config, said) if masked else None
    options = Eagle3Options(aux, wide, draft, embeddings=own, mask=mask, **flags)
    return _on_paper(lambda: (PEagle if masked else Eagle3)(config, options))


def _dflash(stored: StoredHeads, config: ModelConfig, tensors: Mapping[str, Tensor], model: Model) -> DFlashHeads:
    said, inner = stored.config, stored.config.get("dflash_config", {})
    where = stored.path / CONFIG
    if not isinstance(inner, dict):
        raise UserError(f"{where}: dflash_config must be an object, got {inner!r}")
    if config.hidden != model.config.hidden:
        raise _other_width(stored, f"hidden_size={config.hidden}", model)
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
    draft = _draft_vocabulary(stored, config, tensors) if "lm_head.weight" in tensors else config.vocab
    options = DFlashOptions(
        aux, block, _mask(stored, config, inner | said), draft, embeddings="embed_tokens.weight" in tensors,
        head="lm_head.weight" in tensors,
    )  # fmt: skip
    return _on_paper(lambda: DFlashHeads(config, options))


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


def _mask(stored: StoredHeads, config: ModelConfig, said: Mapping[str, Any]) -> int:
    """The token that masks are embedded as. Raises UserError where none is named, or one that is no token."""
    mask = next((said[name] for name in MASKS if said.get(name) is not None), None)
    if isinstance(mask, bool) or not isinstance(mask, int) or not 0 <= mask < config.vocab:
        raise UserError(f"{stored.path / CONFIG}: mask_token_id={mask!r} must be a token from 0 to {config.vocab - 1}")
    return mask


def _draft_vocabulary(stored: StoredHeads, config: ModelConfig, tensors: Mapping[str, Tensor]) -> int:
    """The number of tokens that an output head of the heads' own foretells. Raises UserError."""
    draft = stored.config.get("draft_vocab_size") or config.vocab
    if not isinstance(draft, int) or not 0 < draft <= config.vocab:
        raise UserError(f"{stored.path / CONFIG}: draft_vocab_size={draft!r} must be from 1 to {config.vocab}")
    if draft != config.vocab:
        _check_vocabulary(stored, tensors, draft, config.vocab)
    return draft


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


def usual_taps(layers: int) -> tuple[int, int, int]:
    """The taps of heads made here: the published ones, or as far apart as a model of few layers has them."""
    return published_taps(layers) if layers >= 8 else (1, max(1, layers // 2), max(1, layers - 1))


def _check_vocabulary(stored: StoredHeads, tensors: Mapping[str, Tensor], draft: int, vocab: int) -> None:
    """Raise UserError unless `d2t` says of each draft token which of the target's it is, none twice."""
    d2t, t2d = tensors.get("d2t"), stored.tensors.get("t2d")
    if d2t is None or d2t.shape != (draft,) or d2t.is_floating_point():
        found = "absent" if d2t is None else f"{d2t.dtype} {list(d2t.shape)}"
        raise UserError(
            f"{stored.path / WEIGHTS}: d2t is {found}, wanted int64 [{draft}]: offsets from draft tokens to the model's"
        )
    ids = torch.arange(draft) + d2t
    different = len(set(ids.tolist()))
    if int(ids.min()) < 0 or int(ids.max()) >= vocab or different < draft:
        raise UserError(
            f"{stored.path / WEIGHTS}: d2t must lead to {draft} different tokens below {vocab}; it leads to "
            f"{different} from {int(ids.min())} to {int(ids.max())}"
        )
    if t2d is not None and (t2d.shape != (vocab,) or not torch.equal(t2d.nonzero().flatten(), ids.sort().values)):
        raise UserError(f"{stored.path / WEIGHTS}: t2d and d2t name different draft vocabularies")


def _named(stored: StoredHeads) -> dict[str, Tensor]:
    """The tensors by the names of the modules here."""
    found: dict[str, Tensor] = {}
    for name, tensor in stored.tensors.items():
        if name in UNREAD or name.endswith(OFTEN):
            continue
        found[f"layers.0.{name.removeprefix('midlayer.')}" if name.startswith("midlayer.") else name] = tensor
    return found


def _filled(made: T, tensors: Mapping[str, Tensor], stored: StoredHeads) -> T:
    """Heads that take these tensors as their own. Raises UserError naming those that are missing, left over or of
    another shape."""
    wanted = {name: tuple(tensor.shape) for name, tensor in made.state_dict().items()}
    given = dict(tensors)
    if "d2t" not in wanted:
        given.pop("d2t", None)
    problems = [f"{name} is missing" for name in sorted(wanted.keys() - given.keys())]
    problems += [f"{name} is left over" for name in sorted(given.keys() - wanted.keys())]
    problems += [
        f"{name} has shape {list(given[name].shape)}, {CONFIG} asks for {list(wanted[name])}"
        for name in sorted(wanted.keys() & given.keys())
        if tuple(given[name].shape) != wanted[name]
    ]
    if problems:
        more = f"; and {len(problems) - 4} more" if len(problems) > 4 else ""
        said = "; ".join(problems[:4]) + more
        raise UserError(f"{stored.path / WEIGHTS} does not hold heads of kind {made.kind}: {said}")
    made.load_state_dict(given, assign=True)
    return made


def _on_paper(make: Callable[[], T]) -> T:
    """A module whose parameters have shapes alone."""
    with torch.device("meta"):
        return make()


def _same_base(stored: StoredHeads, model: Model, kind: str) -> None:
    base = stored.own.get("base")
    if base is not None and base != fingerprint(model):
        raise UserError(f"{stored.path}: these heads were trained for another model ({base}) than the one in "
                        f"{model.files.path} ({fingerprint(model)}). Train some for it: "
                        f"{train_command(kind, str(model.files.path))}")  # fmt: skip


def _other_width(stored: StoredHeads, said: str, model: Model) -> UserError:
    return UserError(f"{stored.path}: these heads are for a model with {said}, the one in {model.files.path} has "
                     f"{model.config.hidden}: give heads made for this model")  # fmt: skip


def _digest(stored: StoredHeads) -> str:
    """Names the weights: a few numbers of each tensor, its shape and its name."""
    parts = [f"{name} {list(tensor.shape)} {tensor.reshape(-1)[:: max(1, tensor.numel() // 8)].tolist()}"
             for name, tensor in sorted(stored.tensors.items())]  # fmt: skip
    return hashlib.blake2b("\n".join(parts).encode(), digest_size=8).hexdigest()


# ---- making
def random_heads(kind: str, model: Model, seed: int) -> FeatureHeads:
    """Heads of the usual shape for a model with normal weights of variance 1 / columns: nothing learned, but at
    work."""
    made = untrained(kind, model)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in made.named_parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5, generator=generator)
        elif name.endswith("bias"):
            nn.init.zeros_(parameter)
    return made


def untrained(kind: str, model: Model, *, narrow: bool = False, draft_vocab: int = 0, guesses: int = 0) -> FeatureHeads:
    """Heads of the usual shape for a model: a plain Llama's block of its widths. `narrow`: with one key head and an MLP
    half as wide as the model. `draft_vocab`: tokens that an EAGLE-3 head knows; 0: all. `guesses`: those of a pass of
    DFlash's heads; 0: as many as usual. These keep a key head for each query head, for what masks know of the text
    comes through keys and values alone."""
    its, config = model.config, plain_layer(model, narrow=narrow)
    if kind == "eagle1":
        return Eagle1(config)
    if kind == "mtp":
        return MTP(config)
    if kind == "dflash":
        block = 1 + guesses if guesses else USUAL_BLOCK
        options = DFlashOptions(usual_taps(its.layers), block, its.vocab - 1, its.vocab)
        config = replace(several(config, DFLASH_LAYERS), qk_norm="head")
        return DFlashHeads(replace(config, kv_heads=config.heads) if narrow else config, options)
    if kind == "peagle":
        return PEagle(config, Eagle3Options(usual_taps(its.layers), its.hidden, its.vocab, mask=its.vocab - 1))
    return Eagle3(config, Eagle3Options(usual_taps(its.layers), its.hidden, draft_vocab or its.vocab))


def plain_layer(model: Model, *, narrow: bool = False) -> ModelConfig:
    """One layer of a plain Llama as wide as a model's; `narrow`: with one key head and an MLP half as wide as the
    model."""
    its = model.config
    config = replace(
        its, family="llama", layers=1, attention=(replace(its.attention[0], window=None, softcap=None),), moe=(None,),
        ropes=its.ropes[:1], rope_of=(0,), qk_norm=None, norm_offset=0.0, activation="silu", qkv_bias=False,
        o_bias=False, mlp_bias=False, embed_scale=1.0, logit_softcap=None, fused=False,
    )  # fmt: skip
    if narrow:
        config = replace(config, kv_heads=1, intermediate=its.hidden // 2)
    return config


def several(config: ModelConfig, layers: int) -> ModelConfig:
    """The same with so many layers as the first."""
    return replace(
        config, layers=layers, attention=config.attention[:1] * layers, moe=(None,) * layers, rope_of=(0,) * layers
    )


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
        its = heads.options
        made |= {
            "architectures": ["Eagle3Speculator"], "draft_vocab_size": its.draft_vocab,
            "target_hidden_size": its.target_hidden, "eagle_aux_hidden_state_layer_ids": list(its.aux),
        }  # fmt: skip
        made |= {flag: getattr(its, flag) for flag in FLAGS}
        if its.mask is not None:
            made |= {"architectures": ["PEagleSpeculator"], "mask_token_id": its.mask}
    if isinstance(heads, DFlashHeads):
        own = heads.options
        made |= {
            "architectures": ["DFlashSpeculator"], "draft_vocab_size": own.draft_vocab, "block_size": own.block,
            "aux_hidden_state_layer_ids": list(own.aux), "mask_token_id": own.mask, "sample_from_anchor": False,
        }  # fmt: skip
    return made


def layer_settings(config: ModelConfig, model: Model) -> dict[str, Any]:
    """The settings of layers as transformers has them, with the rotation of a model's."""
    raw = model.files.settings()
    layer = {
        "model_type": "qwen3" if config.qk_norm else "llama", "hidden_size": config.hidden,
        "intermediate_size": config.intermediate, "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads, "head_dim": config.head_dim, "num_hidden_layers": config.layers,
        "vocab_size": config.vocab, "max_position_embeddings": config.max_positions, "rms_norm_eps": config.eps,
        "hidden_act": config.activation, "attention_bias": config.qkv_bias, "mlp_bias": config.mlp_bias,
        "tie_word_embeddings": False,
    }  # fmt: skip
    return layer | {key: raw.get(key) for key in ROPE if raw.get(key) is not None}


def tensors_of(heads: FeatureHeads) -> dict[str, Tensor]:
    """The tensors of heads as they are stored: with `t2d` beside `d2t`."""
    found = dict(heads.state_dict())
    if heads.d2t is not None:
        t2d = torch.zeros(heads.config.vocab, dtype=torch.bool)
        t2d[heads.draft_ids().cpu()] = True
        found["t2d"] = t2d
    return found
