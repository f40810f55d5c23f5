"""Architectures: from a file's metadata to settings as `config.json` has them, and to the names of its tensors there.

Names and keys are those that the ggml project's converters write; what they change in a tensor is undone here (`Way`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from phasewise.errors import UnsupportedModel, UserError, near
from phasewise.gguf.container import Metadata

# "pairs": rows of a head are (first, second) of each rotated pair in turn; "raised": a norm's weight plus one
Change = Literal["", "pairs of queries", "pairs of keys", "raised"]
Lists = Callable[[str], list[float]]  # the values of a small tensor


@dataclass(frozen=True)
class Way:
    """Where a tensor of the decoder lies: a tensor of the file, one entry of it (an expert's), and what to undo."""

    name: str
    entry: int | None = None
    change: Change = ""


@dataclass(frozen=True)
class Found:
    """What a family is read from: the metadata below its own name, which tensors there are, and small ones' values."""

    meta: Metadata
    prefix: str
    tensors: frozenset[str]
    values: Lists

    def key(self, name: str) -> str:
        return f"{self.prefix}.{name}"


@dataclass(frozen=True)
class Family:
    """One `general.architecture`: its name in config.json, further settings, and what its converter changes."""

    model_type: str
    more: Callable[[Found], dict[str, Any]] = lambda found: {}
    paired: bool = False  # queries and keys lie in pairs
    raised: bool = False
    norms: tuple[tuple[str, str], ...] = (("attn_norm", "input_layernorm"), ("ffn_norm", "post_attention_layernorm"))


AFTER = (("post_attention_norm", "post_attention_layernorm"), ("post_ffw_norm", "post_feedforward_layernorm"))
BOTH = (("attn_norm", "input_layernorm"), ("ffn_norm", "pre_feedforward_layernorm"), *AFTER)
ATTENTION = (("attn_q", "q_proj"), ("attn_k", "k_proj"), ("attn_v", "v_proj"), ("attn_output", "o_proj"),
             ("attn_qkv", "qkv_proj"))  # fmt: skip
HEADS = (("attn_q_norm", "q_norm"), ("attn_k_norm", "k_norm"))
MLP = (("ffn_gate", "gate_proj"), ("ffn_up", "up_proj"), ("ffn_down", "down_proj"))


# ---- settings
def settings(found: Found, vocab: int) -> dict[str, Any]:
    """`config.json` for a file. Raises UnsupportedModel for an architecture that the decoder lacks, and UserError for
    metadata that is missing or absurd."""
    meta, key = found.meta, found.key
    heads = meta.whole(key("attention.head_count"))
    hidden = meta.whole(key("embedding_length"))
    if hidden % heads and key("attention.key_length") not in meta.values:
        raise UserError(f"{meta.path}: {key('attention.head_count')} {heads} does not divide "
                        f"{key('embedding_length')} {hidden}.")  # fmt: skip
    size = meta.whole(key("attention.key_length"), hidden // heads or 1)
    rotated = meta.whole(key("rope.dimension_count"), size)
    if size % 2 or rotated % 2 or rotated > size:
        raise UserError(
            f"{meta.path}: {rotated} rotated dimensions of {size}: both must be even, and no more than that."
        )
    if meta.whole(key("attention.value_length"), size) != size:
        raise UnsupportedModel(f"{meta.path}: keys of {size} and values of another width cannot be read.")
    ends = [meta.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    values = {
        "model_type": family(found).model_type,
        "num_hidden_layers": meta.whole(key("block_count")),
        "hidden_size": hidden,
        "intermediate_size": meta.whole(key("feed_forward_length")),
        "num_attention_heads": heads,
        "num_key_value_heads": meta.whole(key("attention.head_count_kv"), heads),
        "head_dim": size,
        "rms_norm_eps": meta.number(key("attention.layer_norm_rms_epsilon")),
        "max_position_embeddings": meta.whole(key("context_length")),
        "rope_theta": meta.number(key("rope.freq_base"), 10_000.0),
        "rope_scaling": _scaling(found),
        "partial_rotary_factor": rotated / size,
        "vocab_size": vocab,
        "tie_word_embeddings": "output.weight" not in found.tensors,
        "bos_token_id": meta.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": list(dict.fromkeys(end for end in ends if type(end) is int)),
        "attention_bias": "blk.0.attn_q.bias" in found.tensors,
        "mlp_bias": "blk.0.ffn_down.bias" in found.tensors,
    }
    return {name: value for name, value in {**values, **family(found).more(found)}.items() if value is not None}


def family(found: Found) -> Family:
    """The family of a file by `general.architecture`."""
    name = found.prefix
    if name == "llama" and "blk.0.ffn_gate_inp.weight" in found.tensors:
        return MIXTRAL
    if name not in FAMILIES:
        raise UnsupportedModel(f"{found.meta.path}: the architecture {name!r} is not supported. {near(name, FAMILIES)}")
    return FAMILIES[name]


def _scaling(found: Found) -> dict[str, Any] | None:
    """Rope settings, where positions are stretched."""
    meta, key = found.meta, found.key
    if "rope_freqs.weight" in found.tensors:
        return {"rope_type": "divided", "divisors": found.values("rope_freqs.weight")}
    if "rope_factors_long.weight" in found.tensors:
        scale = meta.get(key("rope.scaling.attn_factor"))
        return {
            "rope_type": "longrope",
            "long_factor": found.values("rope_factors_long.weight"),
            "short_factor": found.values("rope_factors_short.weight"),
            "original_max_position_embeddings": meta.whole(key("rope.scaling.original_context_length")),
            **({} if scale is None else {"attention_factor": meta.number(key("rope.scaling.attn_factor"))}),
        }
    kind = meta.text(key("rope.scaling.type"), "none")
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise UnsupportedModel(
            f"{meta.path}: rope scaling {kind!r} cannot be read. Valid: linear, longrope, none, yarn."
        )
    more = {}
    if kind == "yarn":
        more = {"original_max_position_embeddings": meta.whole(key("rope.scaling.original_context_length"))}
    return {"rope_type": kind, "factor": meta.number(key("rope.scaling.factor")), **more}


def _window(found: Found) -> dict[str, Any]:
    window = found.meta.get(found.key("attention.sliding_window"))
    return {"sliding_window": found.meta.whole(found.key("attention.sliding_window")) if window else None}


def _qwen3_moe(found: Found) -> dict[str, Any]:
    meta, key = found.meta, found.key
    return {
        "num_experts": meta.whole(key("expert_count")),
        "num_experts_per_tok": meta.whole(key("expert_used_count")),
        "moe_intermediate_size": meta.whole(key("expert_feed_forward_length")),
        "norm_topk_prob": True,
    }


def _mixtral(found: Found) -> dict[str, Any]:
    meta, key = found.meta, found.key
    return {
        "num_local_experts": meta.whole(key("expert_count")),
        "num_experts_per_tok": meta.whole(key("expert_used_count")),
    }


def _gemma(found: Found, largest: int) -> dict[str, Any]:
    """`largest`: how many layers the one size has whose scores are scaled by another width than a head's."""
    meta, key = found.meta, found.key
    layers, heads = meta.whole(key("block_count")), meta.whole(key("attention.head_count"))
    hidden = meta.whole(key("embedding_length"))
    size = meta.whole(key("attention.key_length"), hidden // heads or 1)
    return {**_window(found), "query_pre_attn_scalar": hidden // heads if layers == largest else size}


def _gemma2(found: Found) -> dict[str, Any]:
    meta, key = found.meta, found.key
    return {
        **_gemma(found, 46),
        "attn_logit_softcapping": meta.number(key("attn_logit_softcapping"), 50.0),
        "final_logit_softcapping": meta.number(key("final_logit_softcapping"), 30.0),
    }


def _gemma3(found: Found) -> dict[str, Any]:
    return {**_gemma(found, 62), "rope_local_base_freq": found.meta.number(found.key("rope.freq_base_swa"), 10_000.0)}


MIXTRAL = Family("mixtral", _mixtral, paired=True)
FAMILIES = {
    "llama": Family("llama", paired=True),  # Mistral's files say llama as well
    "qwen2": Family("qwen2"),
    "qwen3": Family("qwen3"),
    "qwen3moe": Family("qwen3_moe", _qwen3_moe),
    "phi3": Family("phi3", _window),
    "olmo2": Family("olmo2", norms=AFTER),
    "smollm3": Family("smollm3", paired=True),
    "gemma2": Family("gemma2", _gemma2, raised=True, norms=BOTH),
    "gemma3": Family("gemma3_text", _gemma3, raised=True, norms=BOTH),
}


# ---- tensors
def ways(found: Found, layers: int) -> dict[str, Way]:
    """Every tensor of the decoder that the file has, by its name in a Hugging Face checkpoint."""
    kind = family(found)
    norm: Change = "raised" if kind.raised else ""
    every = {
        "model.embed_tokens.weight": Way("token_embd.weight"),
        "model.norm.weight": Way("output_norm.weight", change=norm),
        "lm_head.weight": Way("output.weight"),
    }
    for i in range(layers):
        every.update(_layer(found, kind, i, norm))
    return {name: way for name, way in every.items() if way.name in found.tensors}


def _layer(found: Found, kind: Family, i: int, norm: Change) -> Iterator[tuple[str, Way]]:
    root, own = f"model.layers.{i}", f"blk.{i}"
    for name, theirs in kind.norms:
        yield f"{root}.{theirs}.weight", Way(f"{own}.{name}.weight", change=norm)
    for name, theirs in HEADS:
        yield f"{root}.self_attn.{theirs}.weight", Way(f"{own}.{name}.weight", change=norm)
    changes: dict[str, Change] = {"attn_q": "pairs of queries", "attn_k": "pairs of keys"} if kind.paired else {}
    for name, theirs in ATTENTION:
        for part in ("weight", "bias"):
            yield f"{root}.self_attn.{theirs}.{part}", Way(f"{own}.{name}.{part}", change=changes.get(name, ""))
    both = (("ffn_up", "gate_up_proj"), ("ffn_down", "down_proj")) if kind.model_type == "phi3" else MLP
    for name, theirs in both:
        for part in ("weight", "bias"):
            yield f"{root}.mlp.{theirs}.{part}", Way(f"{own}.{name}.{part}")
    yield from _experts(found, kind, i)


def _experts(found: Found, kind: Family, i: int) -> Iterator[tuple[str, Way]]:
    gate = Way(f"blk.{i}.ffn_gate_inp.weight")
    if gate.name not in found.tensors:
        return
    mixtral = kind is MIXTRAL
    root = f"model.layers.{i}.{'block_sparse_moe' if mixtral else 'mlp'}"
    yield f"{root}.gate.weight", gate
    names = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
    for (name, _), theirs in zip(MLP, names):
        for e in range(found.meta.whole(found.key("expert_count"))):
            whole, single = f"blk.{i}.{name}_exps.weight", f"blk.{i}.{name}.{e}.weight"  # the latter in older files
            way = Way(single) if single in found.tensors else Way(whole, entry=e)
            yield f"{root}.experts.{e}.{theirs}.weight", way


def undone(values: NDArray[np.float32], change: Change) -> NDArray[np.float32]:
    """`values` float32 [rows, ...] as they were before the converter; rows of one head, where pairs are undone."""
    if change == "raised":
        return values - np.float32(1.0)
    if change:
        return values.reshape(-1, 2, *values.shape[1:]).swapaxes(0, 1).reshape(values.shape)
    return values
