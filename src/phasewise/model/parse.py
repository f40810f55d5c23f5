"""From the settings in `config.json` to ModelConfig, or to an error that says what is not supported and why."""

from __future__ import annotations

from phasewise.errors import UnsupportedModel, UserError, near
from phasewise.model.config import ModelConfig
from phasewise.model.families import FAMILIES
from phasewise.model.mlp import ACTIVATION
from phasewise.model.quantisation import quantisation
from phasewise.model.raw import RawConfig


def parse_config(raw: RawConfig, context: int | None = None) -> ModelConfig:
    """The architecture that settings describe, to be used for sequences of up to `context` tokens.

    `context` None takes the checkpoint's own length. Raises UserError for settings that are wrong and UnsupportedModel
    for an architecture the decoder lacks.
    """
    name = str(raw.get("model_type", ""))
    if name not in FAMILIES:
        raise UnsupportedModel(f"{raw.path}: model_type {name!r} is not supported. {near(name, FAMILIES)}")
    wanted = raw.get("architectures", [])
    if wanted and not any(str(each).endswith("ForCausalLM") for each in wanted):
        raise UnsupportedModel(f"{raw.path}: architecture {wanted[0]!r} is not a language model head; only "
                               "*ForCausalLM checkpoints are supported.")  # fmt: skip
    quantisation(raw)  # refuses what cannot be read
    config = FAMILIES[name](raw, context)
    _check(config, raw)
    return config


def _check(config: ModelConfig, raw: RawConfig) -> None:
    if config.heads % config.kv_heads:
        raise UserError(f"{raw.path}: num_attention_heads {config.heads} is not a multiple of "
                        f"num_key_value_heads {config.kv_heads}.")  # fmt: skip
    if config.activation not in ACTIVATION:
        raise UnsupportedModel(f"{raw.path}: unknown activation {config.activation!r}. "
                               f"{near(config.activation, ACTIVATION)}")  # fmt: skip
    if raw.get("use_bidirectional_attention"):
        raise UnsupportedModel(f"{raw.path}: bidirectional attention is not supported; this is an embedding model.")
    for rope in config.ropes:
        if rope.dim > config.head_dim:
            raise UserError(f"{raw.path}: {rope.dim} rotary dimensions do not fit a head of {config.head_dim}.")
