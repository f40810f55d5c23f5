"""The layers of heads as settings: read from a head's configuration, made for a model, and written.

vLLM's `speculators` keeps them in `transformer_layer_config`; other layouts have those of a whole model.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from phasewise.errors import UserError
from phasewise.model.config import ModelConfig
from phasewise.model.model import Model
from phasewise.model.parse import parse_config
from phasewise.model.raw import RawConfig
from phasewise.speculation.heads.folder import CONFIG, StoredHeads

LAYER = "transformer_layer_config"
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
ROPE = ("rope_theta", "rope_scaling", "rope_parameters")


# ---- reading
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


def one_layer(model: Model) -> dict[str, Any]:
    """A model's own settings, with one layer."""
    return {**model.files.settings().values, "num_hidden_layers": 1, "layer_types": None}


# ---- making
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
