"""The supported families: one small function each from `config.json` to ModelConfig, found by `model_type`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from phasewise.errors import UserError
from phasewise.model.config import AttentionSpec, ClampedGate, ModelConfig, MoeSpec, Norms
from phasewise.model.raw import RawConfig
from phasewise.model.rope import Rope, RopeRequest, context_limits, make_rope

SLIDING, FULL = "sliding_attention", "full_attention"
Family = Callable[[RawConfig, int | None], ModelConfig]


def _settings(raw: RawConfig, theta: float) -> dict[str, Any]:
    """The rope settings of a checkpoint with one kind of rotation, from either generation of `config.json`."""
    settings = raw.mapping("rope_parameters") or raw.mapping("rope_scaling")
    if settings.get("rope_theta") is None:
        settings["rope_theta"] = raw.number("rope_theta", theta)
    if settings.get("partial_rotary_factor") is None:
        settings["partial_rotary_factor"] = raw.number("partial_rotary_factor", 1.0)
    return settings


def _original(raw: RawConfig, settings: Mapping[str, Any]) -> int:
    trained = raw.size("max_position_embeddings")
    return raw.size("original_max_position_embeddings", settings.get("original_max_position_embeddings") or trained)


def _context(raw: RawConfig, settings: Mapping[str, Any], context: int | None) -> int:
    """The sequence length to serve; UserError when the checkpoint's positions do not reach that far."""
    trained = raw.size("max_position_embeddings")
    usual, most = context_limits(settings, trained, _original(raw, settings))
    if context is not None and not 0 < context <= most:
        raise UserError(f"context={context} is out of range for {raw.path}: it must be between 1 and {most}.")
    return usual if context is None else context


def _rope(raw: RawConfig, settings: Mapping[str, Any], head_dim: int, context: int) -> Rope:
    dim = int(head_dim * float(settings.get("partial_rotary_factor") or 1.0))
    trained = raw.size("max_position_embeddings")
    theta = float(settings["rope_theta"])
    return make_rope(RopeRequest(dim, theta, trained, _original(raw, settings), context, settings))


def _windows(raw: RawConfig, kinds: Sequence[str], config: ModelConfig) -> tuple[AttentionSpec, ...]:
    """One spec per layer from the layers' kinds; a sliding layer needs `sliding_window`."""
    if len(kinds) != config.layers:
        raise UserError(f"{raw.path}: layer_types has {len(kinds)} entries for {config.layers} layers.")
    window = raw.size("sliding_window") if SLIDING in kinds else None
    return tuple(replace(spec, window=window if kind == SLIDING else None)
                 for spec, kind in zip(config.attention, kinds))  # fmt: skip


def _common(raw: RawConfig, context: int | None, *, theta: float = 10_000.0, eps: float = 1e-6,
            head_dim: int | None = None) -> ModelConfig:  # fmt: skip
    """A plain Llama; the families below change single fields of it."""
    layers, hidden, heads = raw.size("num_hidden_layers"), raw.size("hidden_size"), raw.size("num_attention_heads")
    size = raw.size("head_dim", head_dim or hidden // heads)
    settings = _settings(raw, theta)
    length = _context(raw, settings, context)
    ends = raw.get("eos_token_id", ())
    return ModelConfig(
        family=str(raw.get("model_type")),
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=raw.size("num_key_value_heads", heads),
        head_dim=size,
        vocab=raw.size("vocab_size"),
        intermediate=raw.size("intermediate_size"),
        max_positions=length,
        eps=raw.number("rms_norm_eps", eps),
        eos=tuple(ends) if isinstance(ends, (list, tuple)) else (ends,),
        bos=raw.get("bos_token_id"),
        mask=raw.get("mask_token_id"),
        attention=(AttentionSpec(size**-0.5),) * layers,
        ropes=(_rope(raw, settings, size, length),),
        rope_of=(0,) * layers,
        moe=(None,) * layers,
        activation=raw.get("hidden_act", "silu"),
        tied=bool(raw.get("tie_word_embeddings", False)),
    )


def _biased(raw: RawConfig, config: ModelConfig) -> ModelConfig:
    bias = bool(raw.get("attention_bias", False))
    return replace(config, qkv_bias=bias, o_bias=bias, mlp_bias=bool(raw.get("mlp_bias", False)))


def llama(raw: RawConfig, context: int | None) -> ModelConfig:
    return _biased(raw, _common(raw, context))


def mistral(raw: RawConfig, context: int | None) -> ModelConfig:
    known = RawConfig({"sliding_window": 4096, **raw.values}, raw.path)  # a null switches the window off
    config = _common(known, context)
    return replace(config, attention=_windows(known, _all_sliding(known, config), config))


def _all_sliding(raw: RawConfig, config: ModelConfig) -> Sequence[str]:
    return (FULL if raw.get("sliding_window") is None else SLIDING,) * config.layers


def _qwen_kinds(raw: RawConfig, config: ModelConfig) -> Sequence[str]:
    if not raw.get("use_sliding_window", False):
        return (FULL,) * config.layers
    first = raw.size("max_window_layers", 28)
    return list(raw.get("layer_types") or [SLIDING if i >= first else FULL for i in range(config.layers)])


def qwen2(raw: RawConfig, context: int | None) -> ModelConfig:
    config = _common(raw, context)
    return replace(config, qkv_bias=True, attention=_windows(raw, _qwen_kinds(raw, config), config))


def qwen3(raw: RawConfig, context: int | None) -> ModelConfig:
    config = _biased(raw, _common(raw, context, head_dim=128))
    return replace(config, qk_norm="head", attention=_windows(raw, _qwen_kinds(raw, config), config))


def qwen3_moe(raw: RawConfig, context: int | None) -> ModelConfig:
    config = _biased(raw, _common(raw, context))
    kinds = _all_sliding(raw, config) if raw.get("use_sliding_window", False) else (FULL,) * config.layers
    spec = MoeSpec(
        experts=raw.size("num_experts", raw.get("num_local_experts", 128)),
        top_k=raw.size("num_experts_per_tok", 8),
        intermediate=raw.size("moe_intermediate_size", 768),
        renormalise=bool(raw.get("norm_topk_prob", False)),
    )
    dense, every = set(raw.get("mlp_only_layers", ())), raw.size("decoder_sparse_step", 1)
    moe = tuple(None if i in dense or (i + 1) % every else spec for i in range(config.layers))
    return replace(config, qk_norm="head", moe=moe, attention=_windows(raw, kinds, config))


def mixtral(raw: RawConfig, context: int | None) -> ModelConfig:
    config = _common(raw, context, theta=1_000_000.0, eps=1e-5)
    spec = MoeSpec(
        experts=raw.size("num_local_experts", 8),
        top_k=raw.size("num_experts_per_tok", 2),
        intermediate=config.intermediate,
        renormalise=True,
        prefix="block_sparse_moe",
        names=("w1", "w3", "w2"),
    )
    windows = _windows(raw, _all_sliding(raw, config), config)
    return replace(config, moe=(spec,) * config.layers, attention=windows)


def phi3(raw: RawConfig, context: int | None) -> ModelConfig:
    settings = _settings(raw, 10_000.0)
    if settings.get("type") == "yarn" or settings.get("rope_type") == "yarn":  # early Phi-3 files call longrope yarn
        settings.update(rope_type="longrope")
    defaults = {"original_max_position_embeddings": 4096, "max_position_embeddings": 4096}
    known = RawConfig({**defaults, **raw.values, "rope_parameters": settings}, raw.path)
    config = _common(known, context, eps=1e-5)
    return replace(config, fused=True, attention=_windows(raw, _all_sliding(raw, config), config))


def olmo2(raw: RawConfig, context: int | None) -> ModelConfig:
    norms = Norms(None, "post_attention_layernorm", None, "post_feedforward_layernorm")
    return replace(_biased(raw, _common(raw, context, eps=1e-5)), norms=norms, qk_norm="full")


def smollm3(raw: RawConfig, context: int | None) -> ModelConfig:
    config = _biased(raw, _common(raw, context, theta=2_000_000.0))
    every = raw.size("no_rope_layer_interval", 4)
    rotated = raw.get("no_rope_layers") or [(i + 1) % every != 0 for i in range(config.layers)]  # 1 = has rotation
    if len(rotated) < config.layers:
        raise UserError(f"{raw.path}: no_rope_layers has {len(rotated)} entries for {config.layers} layers.")
    sliding = raw.get("use_sliding_window", False) and raw.get("sliding_window") is not None
    kinds = raw.get("layer_types") or [SLIDING if sliding and not turns else FULL for turns in rotated[: config.layers]]
    return replace(
        config,
        rope_of=tuple(0 if turns else None for turns in rotated[: config.layers]),
        attention=_windows(raw, kinds if sliding else (FULL,) * config.layers, config),
        tied=bool(raw.get("tie_word_embeddings", True)),
    )


def _gemma(raw: RawConfig, context: int | None, softcap: float | None, kinds: Sequence[str]) -> ModelConfig:
    config = _biased(raw, _common(raw, context, head_dim=256))
    scale = raw.number("query_pre_attn_scalar", 256) ** -0.5
    attention = tuple(AttentionSpec(scale, spec.window, softcap) for spec in _windows(raw, kinds, config))
    return replace(
        config,
        attention=attention,
        norms=Norms("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm",
                    "post_feedforward_layernorm"),
        norm_offset=1.0,
        activation=raw.get("hidden_activation", "gelu_pytorch_tanh"),
        embed_scale=math.sqrt(config.hidden),
        tied=bool(raw.get("tie_word_embeddings", True)),
    )  # fmt: skip


def _softcap(raw: RawConfig, key: str, default: float | None) -> float | None:
    """An explicit null switches the cap off; only a missing key takes the default."""
    return default if key not in raw.values else raw.get(key)


def gemma2(raw: RawConfig, context: int | None) -> ModelConfig:
    kinds = raw.get("layer_types") or [FULL if i % 2 else SLIDING for i in range(raw.size("num_hidden_layers"))]
    known = RawConfig({"sliding_window": 4096, "max_position_embeddings": 8192, **raw.values}, raw.path)
    config = _gemma(known, context, _softcap(raw, "attn_logit_softcapping", 50.0), kinds)
    return replace(config, logit_softcap=_softcap(raw, "final_logit_softcapping", 30.0))


def gemma3(raw: RawConfig, context: int | None) -> ModelConfig:
    """Local layers slide and rotate with their own base; every sixth layer is global (Gemma3ForCausalLM)."""
    every = raw.size("sliding_window_pattern", 6)
    layers = raw.size("num_hidden_layers")
    kinds = list(raw.get("layer_types") or [SLIDING if (i + 1) % every else FULL for i in range(layers)])
    given = raw.mapping("rope_parameters")
    shared = raw.mapping("rope_scaling")
    far = {"rope_theta": raw.number("rope_theta", 1_000_000.0), **shared, **(given.get(FULL) or {})}
    near_by = {"rope_theta": raw.number("rope_local_base_freq", 10_000.0), **(given.get(SLIDING) or {})}
    defaults = {"sliding_window": 4096, "max_position_embeddings": 131_072}
    known = RawConfig({**defaults, **raw.values, "rope_parameters": far}, raw.path)
    config = _gemma(known, context, None, kinds)
    ropes = (*config.ropes, _rope(known, near_by, config.head_dim, config.max_positions))
    return replace(
        config,
        ropes=ropes,
        rope_of=tuple(1 if kind == SLIDING else 0 for kind in kinds),
        qk_norm="head",
        logit_softcap=_softcap(raw, "final_logit_softcapping", None),
    )


def gpt_oss(raw: RawConfig, context: int | None) -> ModelConfig:
    """Experts with a clamped gate and biases; heads with sink scores; every other layer slides."""
    layers = raw.size("num_hidden_layers")
    rope = {"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096}
    given = raw.mapping("rope_parameters") or raw.mapping("rope_scaling") or rope
    defaults = {"sliding_window": 128, "max_position_embeddings": 131_072, "attention_bias": True}
    known = RawConfig({**defaults, **raw.values, "rope_parameters": given}, raw.path)
    config = _biased(known, _common(known, context, theta=150_000.0, eps=1e-5, head_dim=64))
    kinds = list(raw.get("layer_types") or [FULL if i % 2 else SLIDING for i in range(layers)])
    spec = MoeSpec(
        experts=raw.size("num_local_experts", 128),
        top_k=raw.size("num_experts_per_tok", 4),
        intermediate=config.intermediate,
        renormalise=True,
        router="router",
        bias=True,
    )
    clamped = ClampedGate(raw.number("swiglu_alpha", 1.702), raw.number("swiglu_limit", 7.0))
    attention = _windows(known, kinds, config)
    return replace(config, attention=attention, moe=(spec,) * layers, clamped=clamped, sink_scores=True)


FAMILIES: dict[str, Family] = {
    "gpt_oss": gpt_oss,
    "llama": llama,
    "mistral": mistral,
    "qwen2": qwen2,
    "mimo": qwen2,  # with a module that foretells one more token (model/modules.py)
    "qwen3": qwen3,
    "qwen3_moe": qwen3_moe,
    "mixtral": mixtral,
    "phi3": phi3,
    "olmo2": olmo2,
    "smollm3": smollm3,
    "gemma2": gemma2,
    "gemma3_text": gemma3,
}
