"""A tiny configuration of every supported family, each with every kind of layer it can have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.lazy import lazy

from .reference import VOCAB

hf: Any = lazy("transformers")

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LONG = [1.0 + 0.5 * i for i in range(6)]
SHORT = [1.0 + 0.1 * i for i in range(6)]
HALF = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": SHORT[:3], "long_factor": LONG[:3],
        "partial_rotary_factor": 0.5}  # fmt: skip


def make(name: str, **changes: Any) -> Callable[[], Any]:
    """A configuration of this class of transformers, of SIZES but for the changes, made when it is called for."""
    return lambda: getattr(hf, name)(**{**SIZES, **changes})


def _rope(**settings: Any) -> dict[str, Any]:
    return {"rope_theta": 10000.0, **settings}


FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": make("LlamaConfig"),
    "llama-biased-tied": make("LlamaConfig", attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
    "llama-mha-wide-heads": make("LlamaConfig", num_key_value_heads=4, head_dim=20),
    "mistral-sliding": make("MistralConfig", sliding_window=5),
    "mistral-full": make("MistralConfig", sliding_window=None),
    "qwen2": make("Qwen2Config", tie_word_embeddings=True),
    "qwen2-sliding": make("Qwen2Config", use_sliding_window=True, sliding_window=6, max_window_layers=1),
    "qwen3": make("Qwen3Config", head_dim=16),
    "qwen3-sliding": make("Qwen3Config", head_dim=16, use_sliding_window=True, sliding_window=6,
                           max_window_layers=2, attention_bias=True),
    "phi3": make("Phi3Config", sliding_window=7),
    "phi3-partial-longrope": make("Phi3Config", rope_parameters=dict(HALF), original_max_position_embeddings=64),
    "gemma2": make("Gemma2Config", head_dim=16, sliding_window=5, query_pre_attn_scalar=24,
                    attn_logit_softcapping=4.0, final_logit_softcapping=6.0),
    "gemma2-uncapped": make("Gemma2Config", head_dim=16, sliding_window=5, attn_logit_softcapping=None,
                             final_logit_softcapping=None),
    "gemma3": make("Gemma3TextConfig", head_dim=16, sliding_window=5, query_pre_attn_scalar=20,
                    layer_types=["sliding_attention", "full_attention", "sliding_attention"],
                    rope_parameters={"full_attention": _rope(rope_type="linear", factor=4.0, rope_theta=50000.0),
                                     "sliding_attention": _rope(rope_type="default")}),
    "olmo2": make("Olmo2Config"),
    "olmo2-biased": make("Olmo2Config", attention_bias=True, num_key_value_heads=4),
    "smollm3": make("SmolLM3Config", no_rope_layers=[1, 0, 1]),
    "smollm3-sliding": make("SmolLM3Config", no_rope_layer_interval=2, use_sliding_window=True, sliding_window=5,
                             tie_word_embeddings=False),
    "mixtral": make("MixtralConfig", num_local_experts=5, num_experts_per_tok=2, sliding_window=6),
    "qwen3_moe": make("Qwen3MoeConfig", num_experts=6, num_experts_per_tok=3, moe_intermediate_size=24,
                       mlp_only_layers=[1], norm_topk_prob=True, head_dim=16),
    "gpt_oss": make("GptOssConfig", num_local_experts=5, num_experts_per_tok=2, sliding_window=6, head_dim=16,
                     rope_parameters=_rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=64,
                                           truncate=False)),
    "qwen3_moe-unnormalised": make("Qwen3MoeConfig", num_experts=6, num_experts_per_tok=2, moe_intermediate_size=24,
                                    decoder_sparse_step=2, norm_topk_prob=False),
}  # fmt: skip

# Families that transformers has no class for, and whose equal it has: their own tests are elsewhere.
WITHOUT_CLASS = {"mimo"}  # tests/speculation/test_carried_modules.py

ROPES: dict[str, Callable[[], Any]] = {
    "linear": make("LlamaConfig", rope_parameters=_rope(rope_type="linear", factor=3.0)),
    "dynamic": make("LlamaConfig", rope_parameters=_rope(rope_type="dynamic", factor=2.0)),
    "llama3": make("LlamaConfig", rope_parameters=_rope(
        rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
        original_max_position_embeddings=32)),
    "yarn": make("LlamaConfig", rope_parameters=_rope(
        rope_type="yarn", factor=4.0, original_max_position_embeddings=64)),
    "yarn-mscale": make("LlamaConfig", rope_parameters=_rope(
        rope_type="yarn", factor=4.0, original_max_position_embeddings=64, beta_fast=8.0, beta_slow=2.0, mscale=0.7,
        mscale_all_dim=1.1, truncate=False)),
    "longrope": make("Phi3Config", original_max_position_embeddings=64, rope_parameters=_rope(
        rope_type="longrope", short_factor=SHORT, long_factor=LONG, partial_rotary_factor=1.0)),
}  # fmt: skip
