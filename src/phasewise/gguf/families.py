"""Architectures: from a file's metadata to settings as `config.json` has them, and to the names of its tensors there.

Names and keys are those that the ggml project's converters write; what they change in a tensor is undone here
(`TensorSource`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from phasewise.errors import UnsupportedModel, UserError, near
from phasewise.gguf.container import Metadata, TextArray
from phasewise.gguf.vocabulary import CONTROL, USER_DEFINED

# "pairs": rows of a head are (first, second) of each rotated pair in turn; "raised": a norm's weight plus one
Change = Literal["", "pairs of queries", "pairs of keys", "raised"]
Lists = Callable[[str], list[float]]  # the values of a small tensor
SLIDING, FULL = "sliding_attention", "full_attention"
LARGEST_HEAD = 1 << 14  # dimensions
BLOCK = re.compile(r"blk\.([0-9]{1,9})\.")
ENDS = frozenset((b"<|eot_id|>", b"<|eom_id|>", b"<|im_end|>", b"<|end|>", b"<end_of_turn>", b"<|endoftext|>",
                  b"<|end_of_text|>"))  # fmt: skip


@dataclass(frozen=True)
class TensorSource:
    """The source of a tensor of the decoder: a tensor of the file, one entry of it (an expert's), and what to undo."""

    name: str
    entry: int | None = None
    change: Change = ""


@dataclass(frozen=True)
class GGUFFields:
    """The inputs of a family: the metadata below its own name, all tensors' shapes, and small ones' values."""

    meta: Metadata
    prefix: str
    tensors: Mapping[str, tuple[int, ...]]
    values: Lists

    def key(self, name: str) -> str:
        return f"{self.prefix}.{name}"

    def blocks(self) -> int:
        """The number of layers by the tensors' names."""
        numbers = (BLOCK.match(name) for name in self.tensors)
        return max((int(number[1]) + 1 for number in numbers if number), default=0)


@dataclass(frozen=True)
class Family:
    """One `general.architecture`: its name in config.json, further settings, and what its converter changes."""

    model_type: str
    more: Callable[[GGUFFields], dict[str, Any]] = lambda found: {}
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
def settings(found: GGUFFields, vocab: int) -> dict[str, Any]:
    """`config.json` for a file. Raises UnsupportedModel for an architecture that the decoder lacks, and UserError for
    metadata that is missing, absurd, or not what the tensors are."""
    meta, key = found.meta, found.key
    kind = family(found)
    layers = meta.whole(key("block_count"))
    if layers != found.blocks():
        raise UserError(f"{meta.path}: {key('block_count')} is {layers:,}, and there are tensors of {found.blocks():,} "
                        "blocks. Download or export it again.")  # fmt: skip
    size, rotated = _head(found)
    values = {
        "model_type": kind.model_type,
        "num_hidden_layers": layers,
        "hidden_size": meta.whole(key("embedding_length")),
        "intermediate_size": meta.whole(key("feed_forward_length")),
        "num_attention_heads": meta.whole(key("attention.head_count")),
        "num_key_value_heads": meta.whole(key("attention.head_count_kv"), meta.whole(key("attention.head_count"))),
        "head_dim": size,
        "rms_norm_eps": meta.number(key("attention.layer_norm_rms_epsilon"), above=0.0),
        "max_position_embeddings": meta.whole(key("context_length")),
        "original_max_position_embeddings": _original(found),
        "rope_theta": meta.number(key("rope.freq_base"), 10_000.0, above=1.0),
        "rope_scaling": _scaling(found),
        # a share that times the size is rounded down: it must not come out below
        "partial_rotary_factor": 1.0 if rotated == size else math.nextafter(rotated / size, 1.0),
        "vocab_size": vocab,
        "tie_word_embeddings": "output.weight" not in found.tensors,
        "bos_token_id": meta.index("tokenizer.ggml.bos_token_id", vocab),
        "eos_token_id": _ends(meta, vocab),
        "attention_bias": "blk.0.attn_q.bias" in found.tensors,
        "mlp_bias": "blk.0.ffn_down.bias" in found.tensors,
        "use_bidirectional_attention": meta.get(key("attention.causal")) is False,
    }
    return {name: value for name, value in {**values, **kind.more(found)}.items() if value is not None}


def _head(found: GGUFFields) -> tuple[int, int]:
    """Dimensions of a head, and how many of them rotate."""
    meta, key = found.meta, found.key
    heads, hidden = meta.whole(key("attention.head_count")), meta.whole(key("embedding_length"))
    if hidden % heads and key("attention.key_length") not in meta.values:
        raise UserError(f"{meta.path}: {key('attention.head_count')} {heads} does not divide "
                        f"{key('embedding_length')} {hidden}.")  # fmt: skip
    size = meta.whole(key("attention.key_length"), hidden // heads or 1, most=LARGEST_HEAD)
    rotated = meta.whole(key("rope.dimension_count"), size)
    if size % 2 or rotated % 2 or rotated > size:
        raise UserError(
            f"{meta.path}: {rotated} rotated dimensions of {size}: both must be even, and no more than that."
        )
    if meta.whole(key("attention.value_length"), size) != size:
        raise UnsupportedModel(f"{meta.path}: keys of {size} and values of another width cannot be read.")
    return size, rotated


def _ends(meta: Metadata, vocab: int) -> list[int]:
    """The tokens that end an answer: those that the metadata name, which is one as a rule, and those whose text says so
    in all published vocabularies that have them."""
    tokens = meta.values.get("tokenizer.ggml.tokens")
    if isinstance(tokens, TextArray) and len(tokens) > vocab:
        raise UserError(f"{meta.path}: {len(tokens):,} tokens, and embeddings of {vocab:,}. Export it again.")
    named = [meta.index(f"tokenizer.ggml.{name}_token_id", vocab) for name in ("eos", "eot", "eom")]
    types = meta.array("tokenizer.ggml.token_type", whole=True)
    known = [i for i, text in enumerate(tokens) if text in ENDS] if isinstance(tokens, TextArray) else []
    marks = [i for i in known if i < len(types) and types[i] in (CONTROL, USER_DEFINED)]
    return list(dict.fromkeys(i for i in (*named, *marks) if i is not None))


def family(found: GGUFFields) -> Family:
    """The family of a file by `general.architecture`."""
    name = found.prefix
    if name == "llama" and "blk.0.ffn_gate_inp.weight" in found.tensors:
        return MIXTRAL
    if name not in FAMILIES:
        raise UnsupportedModel(f"{found.meta.path}: the architecture {name[:60]!r} is not supported. "
                               f"{near(name[:60], FAMILIES)}")  # fmt: skip
    return FAMILIES[name]


def _scaling(found: GGUFFields) -> dict[str, Any] | None:
    """Rope settings, where positions are stretched."""
    meta, key = found.meta, found.key
    if "rope_freqs.weight" in found.tensors:
        return {"rope_type": "divided", "divisors": found.values("rope_freqs.weight")}
    # a file with a factor and no type means linear; the oldest have the factor under a key of its own
    factor = meta.number(key("rope.scaling.factor"), meta.number(key("rope.scale_linear"), 0.0))
    kind = meta.text(key("rope.scaling.type"), "linear" if factor else "none")
    if kind == "longrope" or "rope_factors_long.weight" in found.tensors:
        return _longrope(found)
    if kind not in ("linear", "none", "yarn"):
        raise UnsupportedModel(
            f"{meta.path}: rope scaling {kind[:60]!r} cannot be read. Valid: linear, longrope, none, yarn."
        )
    if kind == "none" or not factor:
        return None
    if factor < 0:
        raise UserError(f"{meta.path}: {key('rope.scaling.factor')} is {factor:g}; positions stretch by more than 0.")
    return {"rope_type": kind, "factor": factor, **(_yarn(found) if kind == "yarn" else {})}


def _longrope(found: GGUFFields) -> dict[str, Any]:
    meta, key = found.meta, found.key
    scale = key("rope.scaling.attn_factor")
    return {
        "rope_type": "longrope",
        "long_factor": found.values("rope_factors_long.weight"),
        "short_factor": found.values("rope_factors_short.weight"),
        **({"attention_factor": meta.number(scale, above=0.0)} if scale in meta.values else {}),
    }


def _yarn(found: GGUFFields) -> dict[str, Any]:
    names = {"attention_factor": "yarn_attn_factor", "beta_fast": "yarn_beta_fast", "beta_slow": "yarn_beta_slow"}
    keys = {theirs: found.key(f"rope.scaling.{name}") for theirs, name in names.items()}
    return {theirs: found.meta.number(key, above=1e-6) for theirs, key in keys.items() if key in found.meta.values}


def _original(found: GGUFFields) -> int | None:
    """The length before stretching, if it is told."""
    name = found.key("rope.scaling.original_context_length")
    original = found.meta.whole(name) if name in found.meta.values else None
    if original == 1:
        raise found.meta.wrong(name, "a length of 2 or more")
    return original


def _window(found: GGUFFields) -> dict[str, Any]:
    window = found.meta.get(found.key("attention.sliding_window"))
    return {"sliding_window": found.meta.whole(found.key("attention.sliding_window")) if window else None}


def _olmo2(found: GGUFFields) -> dict[str, Any]:
    if _window(found)["sliding_window"] is not None:
        raise UnsupportedModel(f"{found.meta.path}: layers with a sliding window make it an OLMo 3, which is not "
                               "supported. Take an OLMo 2.")  # fmt: skip
    return {}


def _experts_of(found: GGUFFields) -> tuple[int, int]:
    """The number of experts of a layer, and of those that a row takes."""
    meta, key, gate = found.meta, found.key, "blk.0.ffn_gate_inp.weight"
    count = meta.whole(key("expert_count"))
    if count != found.tensors.get(gate, (0,))[0]:
        shape = list(found.tensors.get(gate, ()))
        raise UserError(f"{meta.path}: {key('expert_count')} is {count:,}, and {gate} has the shape {shape}: one row "
                        "for each expert is needed.")  # fmt: skip
    return count, meta.whole(key("expert_used_count"), most=count)


def _qwen3_moe(found: GGUFFields) -> dict[str, Any]:
    meta, key = found.meta, found.key
    experts, used = _experts_of(found)
    shared = max(1, meta.whole(key("feed_forward_length")) // used)
    return {
        "num_experts": experts,
        "num_experts_per_tok": used,
        "moe_intermediate_size": meta.whole(key("expert_feed_forward_length"), shared),
        "norm_topk_prob": True,
    }


def _mixtral(found: GGUFFields) -> dict[str, Any]:
    experts, used = _experts_of(found)
    return {"num_local_experts": experts, "num_experts_per_tok": used}


def _gemma(found: GGUFFields, largest: int, every: int) -> dict[str, Any]:
    """`largest`: how many layers the one size has whose scores are scaled by another width than a head's; `every`: of
    so many layers the last sees everything, unless the file says otherwise."""
    meta, key = found.meta, found.key
    layers, heads = meta.whole(key("block_count")), meta.whole(key("attention.head_count"))
    hidden = meta.whole(key("embedding_length"))
    size = _head(found)[0]
    return {
        **_window(found),
        "layer_types": [SLIDING if slides else FULL for slides in _slides(found, layers, every)],
        "query_pre_attn_scalar": hidden // heads if layers == largest else size,
    }


def _slides(found: GGUFFields, layers: int, every: int) -> list[bool]:
    """Which layers have a window: a pattern is a flag for each, or of how many the last has none."""
    name = found.key("attention.sliding_window_pattern")
    pattern = found.meta.get(name)
    if isinstance(pattern, np.ndarray):
        if len(pattern) != layers:
            raise UserError(f"{found.meta.path}: {name} is for {len(pattern)} blocks, and there are {layers}.")
        return [bool(each) for each in pattern]
    period = found.meta.whole(name, every)
    return [(i + 1) % period != 0 for i in range(layers)]


def _gemma2(found: GGUFFields) -> dict[str, Any]:
    meta, key = found.meta, found.key
    return {
        **_gemma(found, 46, 2),
        "attn_logit_softcapping": meta.number(key("attn_logit_softcapping"), 50.0, above=0.0),
        "final_logit_softcapping": meta.number(key("final_logit_softcapping"), 30.0, above=0.0),
    }


def _gemma3(found: GGUFFields) -> dict[str, Any]:
    meta, cap = found.meta, found.key("final_logit_softcapping")
    every = _gemma(found, 62, 6)
    if every["sliding_window"] is None:  # a file that tells of no window has none
        every["layer_types"] = [FULL] * len(every["layer_types"])
    return {
        **every,
        "rope_local_base_freq": meta.number(found.key("rope.freq_base_swa"), 10_000.0, above=1.0),
        "final_logit_softcapping": meta.number(cap, above=0.0) if cap in meta.values else None,
    }


def _gpt_oss(found: GGUFFields) -> dict[str, Any]:
    meta, key = found.meta, found.key
    experts, used = _experts_of(found)
    scaling = _scaling(found)
    return {
        **_window(found),
        "num_local_experts": experts,
        "num_experts_per_tok": used,
        "intermediate_size": meta.whole(key("expert_feed_forward_length")),
        "layer_types": [SLIDING if slides else FULL for slides in _slides(found, meta.whole(key("block_count")), 2)],
        "rope_scaling": scaling and {**scaling, "truncate": False},
    }


MIXTRAL = Family("mixtral", _mixtral, paired=True)
FAMILIES = {
    "llama": Family("llama", paired=True),  # Mistral's files say llama as well
    "qwen2": Family("qwen2"),
    "qwen3": Family("qwen3"),
    "qwen3moe": Family("qwen3_moe", _qwen3_moe),
    "phi3": Family("phi3", _window),
    "olmo2": Family("olmo2", _olmo2, norms=AFTER),
    "smollm3": Family("smollm3", paired=True),
    "gemma2": Family("gemma2", _gemma2, raised=True, norms=BOTH),
    "gpt-oss": Family("gpt_oss", _gpt_oss, norms=(("attn_norm", "input_layernorm"), AFTER[0])),
    "gemma3": Family("gemma3_text", _gemma3, raised=True, norms=BOTH),
}


# ---- tensors
def ways(found: GGUFFields, layers: int) -> dict[str, TensorSource]:
    """Every tensor of the decoder that the file has, by its name in a Hugging Face checkpoint."""
    kind = family(found)
    norm: Change = "raised" if kind.raised else ""
    every = {
        "model.embed_tokens.weight": TensorSource("token_embd.weight"),
        "model.norm.weight": TensorSource("output_norm.weight", change=norm),
        "lm_head.weight": TensorSource("output.weight"),
    }
    for i in range(layers):
        every.update(_layer(found, kind, i, norm))
    return {name: way for name, way in every.items() if way.name in found.tensors}


def _layer(found: GGUFFields, kind: Family, i: int, norm: Change) -> Iterator[tuple[str, TensorSource]]:
    root, own = f"model.layers.{i}", f"blk.{i}"
    for name, theirs in kind.norms:
        yield f"{root}.{theirs}.weight", TensorSource(f"{own}.{name}.weight", change=norm)
    for name, theirs in HEADS:
        yield f"{root}.self_attn.{theirs}.weight", TensorSource(f"{own}.{name}.weight", change=norm)
    changes: dict[str, Change] = {"attn_q": "pairs of queries", "attn_k": "pairs of keys"} if kind.paired else {}
    for name, theirs in ATTENTION:
        for part in ("weight", "bias"):
            yield (
                f"{root}.self_attn.{theirs}.{part}",
                TensorSource(f"{own}.{name}.{part}", change=changes.get(name, "")),
            )
    yield f"{root}.self_attn.sinks", TensorSource(f"{own}.attn_sinks.weight")
    both = (("ffn_up", "gate_up_proj"), ("ffn_down", "down_proj")) if kind.model_type == "phi3" else MLP
    for name, theirs in both:
        for part in ("weight", "bias"):
            yield f"{root}.mlp.{theirs}.{part}", TensorSource(f"{own}.{name}.{part}")
    yield from _experts(found, kind, i)


def _experts(found: GGUFFields, kind: Family, i: int) -> Iterator[tuple[str, TensorSource]]:
    gate = TensorSource(f"blk.{i}.ffn_gate_inp.weight")
    if gate.name not in found.tensors:
        return
    count, mixtral = found.meta.whole(found.key("expert_count")), kind is MIXTRAL
    if found.tensors[gate.name][0] != count:
        raise UserError(f"{found.meta.path}: {gate.name} has {found.tensors[gate.name][0]:,} rows for {count:,} "
                        "experts. Download or export it again.")  # fmt: skip
    root = f"model.layers.{i}.{'block_sparse_moe' if mixtral else 'mlp'}"
    router = "router" if kind.model_type == "gpt_oss" else "gate"
    yield f"{root}.{router}.weight", gate
    yield f"{root}.{router}.bias", TensorSource(f"blk.{i}.ffn_gate_inp.bias")
    names = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
    for (name, _), theirs in zip(MLP, names):
        whole = f"blk.{i}.{name}_exps.weight"
        if whole in found.tensors and found.tensors[whole][0] != count:
            raise UserError(f"{found.meta.path}: {whole} has {found.tensors[whole][0]:,} of {count:,} experts. "
                            "Download or export it again.")  # fmt: skip
        for e in range(count):
            single = f"blk.{i}.{name}.{e}.weight"  # in older files
            way = TensorSource(single) if single in found.tensors else TensorSource(whole, entry=e)
            yield f"{root}.experts.{e}.{theirs}.weight", way
            yield f"{root}.experts.{e}.{theirs}.bias", TensorSource(f"blk.{i}.{name}_exps.bias", entry=e)


def undone(values: NDArray[Any], change: Change) -> NDArray[Any]:
    """`values` [rows, ...] as they were before the converter; rows of one head, where pairs are undone."""
    if change == "raised":
        return values - np.float32(1.0)
    if change:
        return values.reshape(-1, 2, *values.shape[1:]).swapaxes(0, 1).reshape(values.shape)
    return values
