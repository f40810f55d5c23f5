"""GGUF files as the ggml project's converter writes them: from a checkpoint's directory, or from a vocabulary alone.

Names of tensors and keys come from the format's own package, so that they are a second opinion on what is read.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from safetensors.torch import load_file
from torch import Tensor

ARCHITECTURES = {"llama": "llama", "mistral": "llama", "mixtral": "llama", "qwen2": "qwen2", "qwen3": "qwen3",
                 "qwen3_moe": "qwen3moe", "phi3": "phi3", "olmo2": "olmo2", "smollm3": "smollm3", "gemma2": "gemma2",
                 "gemma3_text": "gemma3", "gpt_oss": "gpt-oss"}  # fmt: skip
PAIRED = ("llama", "smollm3")  # their rows of queries and keys are put in pairs
EXPERT = re.compile(r"(model\.layers\.(\d+)\.(?:block_sparse_moe|mlp)\.experts)\.(\d+)\.(\w+)\.weight")
JOINED = re.compile(r"model\.layers\.\d+\.mlp\.experts\.(gate_up|down)_proj(_bias)?")
KINDS = {"w1": "gate", "w3": "up", "w2": "down", "gate_proj": "gate", "up_proj": "up", "down_proj": "down"}


@dataclass
class Vocabulary:
    """What a file says of its tokens. `extra`: further keys below `tokenizer.ggml`."""

    model: str
    tokens: Sequence[str | bytes]
    types: Sequence[int] | None = None
    scores: Sequence[float] | None = None
    merges: Sequence[str] | None = None
    pre: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    template: str | list[dict[str, str]] | None = None

    def add(self, writer: GGUFWriter) -> None:
        writer.add_tokenizer_model(self.model)
        if self.pre is not None:
            writer.add_tokenizer_pre(self.pre)
        writer.add_token_list(list(self.tokens))
        if self.scores is not None:
            writer.add_token_scores(list(self.scores))
        if self.types is not None:
            writer.add_token_types(list(self.types))
        if self.merges is not None:
            writer.add_token_merges(list(self.merges))
        if self.template is not None:
            writer.add_chat_template(self.template)
        for key, value in self.extra.items():
            add(writer, f"tokenizer.ggml.{key}", value)


@dataclass
class Conversion:
    """How a directory becomes a file. `quantise`: the type of matrices; `merged` False: experts as older files have
    them; `extra`: keys below the architecture's name, over those of the converter (None: left out)."""

    quantise: GGMLQuantizationType = GGMLQuantizationType.F32
    merged: bool = True
    vocabulary: Vocabulary | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    shards: int = 1  # tensors of a file, where there are several

    def write(self, directory: Path, path: Path) -> Path:
        """The file (the first of them) for the checkpoint in a directory."""
        config = json.loads((directory / "config.json").read_text())
        architecture = ARCHITECTURES[config["model_type"]]
        writer = GGUFWriter(path, architecture, split_max_tensors=0 if self.shards == 1 else self.shards)
        keys = {**_keys(config, architecture), **self.extra}
        for key, value in keys.items():
            if value is not None:
                add(writer, f"{architecture}.{key}", value)
        (self.vocabulary or _plain(config)).add(writer)
        for name, tensor in _tensors(config, architecture, load_file(directory / "model.safetensors"), self.merged):
            _add_tensor(writer, name, tensor, self.quantise)
        return finish(writer, path)


def _plain(config: dict[str, Any]) -> Vocabulary:
    size, names = config["vocab_size"], {"bos": "bos", "eos": "eos", "pad": "padding"}
    ids = {f"{ours}_token_id": config[f"{name}_token_id"] for name, ours in names.items()}
    return Vocabulary("llama", [f"t{i}" for i in range(size)], [1] * size, [0.0] * size, extra=ids)


def add(writer: GGUFWriter, key: str, value: Any) -> None:
    """A key of the type that the converter gives such a value."""
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        (writer.add_int32 if value < 0 else writer.add_uint64 if value >> 32 else writer.add_uint32)(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def finish(writer: GGUFWriter, path: Path) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path if path.is_file() else sorted(path.parent.glob(f"{path.stem}-00001-of-*.gguf"))[0]


def _add_tensor(writer: GGUFWriter, name: str, tensor: Tensor, kind: GGMLQuantizationType) -> None:
    values = tensor.float().numpy()
    if values.ndim < 2 or name.startswith("rope_"):
        kind = GGMLQuantizationType.F32
    if kind == GGMLQuantizationType.F32:
        writer.add_tensor(name, values)
    else:
        raw = gguf.quants.quantize(values, kind)
        writer.add_tensor(name, raw, raw_dtype=kind)


# ---- keys
def _keys(config: dict[str, Any], architecture: str) -> dict[str, Any]:
    rope = config.get("rope_parameters") or {}
    far = rope.get("full_attention", rope)
    keys = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "attention.key_length": config.get("head_dim"),
        "attention.value_length": config.get("head_dim"),
        "rope.freq_base": float(far["rope_theta"]),
        "expert_count": config.get("num_local_experts", config.get("num_experts")),
        "expert_used_count": config.get("num_experts_per_tok"),
        **_scaling(far),
    }
    more: Callable[..., dict[str, Any]] | None = MORE.get(architecture)
    return {**keys, **(more(config, rope) if more else {})}


def _scaling(rope: dict[str, Any]) -> dict[str, Any]:
    kind = rope.get("rope_type")
    if kind not in ("linear", "yarn"):
        return {}
    found = {"rope.scaling.type": kind, "rope.scaling.factor": float(rope["factor"])}
    if kind == "yarn":
        names = {"attention_factor": "yarn_attn_factor", "beta_fast": "yarn_beta_fast", "beta_slow": "yarn_beta_slow"}
        found["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
        found.update({f"rope.scaling.{ours}": float(rope[name]) for name, ours in names.items() if rope.get(name)})
    return found


def _head_dim(config: dict[str, Any]) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def _llama(config: dict[str, Any], rope: dict[str, Any]) -> dict[str, Any]:
    return {"vocab_size": config["vocab_size"], "rope.dimension_count": _head_dim(config)}


def _phi3(config: dict[str, Any], rope: dict[str, Any]) -> dict[str, Any]:
    original = rope.get("original_max_position_embeddings") or config["original_max_position_embeddings"]
    rotated = int(rope.get("partial_rotary_factor", 1.0) * config["hidden_size"]) // config["num_attention_heads"]
    scale = config["max_position_embeddings"] / original
    factor = math.sqrt(1 + math.log(scale) / math.log(original)) if scale > 1 else 1.0
    return {
        "rope.dimension_count": rotated,
        "rope.scaling.original_context_length": original,
        "rope.scaling.attn_factor": factor if rope.get("long_factor") else None,
        "attention.sliding_window": config.get("sliding_window") or 0,
    }


def _gemma2(config: dict[str, Any], rope: dict[str, Any]) -> dict[str, Any]:
    return {
        "rope.freq_base": None,  # not written: it is the default
        "attn_logit_softcapping": config["attn_logit_softcapping"],
        "final_logit_softcapping": config["final_logit_softcapping"],
        "attention.sliding_window": config["sliding_window"],
    }


def _gemma3(config: dict[str, Any], rope: dict[str, Any]) -> dict[str, Any]:
    return {
        "rope.freq_base_swa": float(rope["sliding_attention"]["rope_theta"]),
        "attention.sliding_window": config["sliding_window"],
        "final_logit_softcapping": config.get("final_logit_softcapping"),
    }


def _gpt_oss(config: dict[str, Any], rope: dict[str, Any]) -> dict[str, Any]:
    return {
        "expert_feed_forward_length": config["intermediate_size"],
        "attention.sliding_window": config["sliding_window"],
    }


def _qwen3moe(config: dict[str, Any], rope: dict[str, Any]) -> dict[str, Any]:
    return {"expert_feed_forward_length": config["moe_intermediate_size"]}


MORE: dict[str, Callable[..., dict[str, Any]]] = {
    "llama": _llama, "smollm3": _llama, "phi3": _phi3, "gemma2": _gemma2, "gemma3": _gemma3, "qwen3moe": _qwen3moe,
    "gpt-oss": _gpt_oss,
}  # fmt: skip


# ---- tensors
def _tensors(
    config: dict[str, Any], architecture: str, tensors: dict[str, Tensor], merged: bool
) -> Iterator[tuple[str, Tensor]]:
    layers = config["num_hidden_layers"]
    numbers = {name: i for i, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(numbers[architecture], layers)
    experts: dict[str, list[Tensor]] = {}
    tensors = dict(_apart(tensors))
    for name, tensor in tensors.items():
        expert = EXPERT.fullmatch(name)
        if expert and merged:
            experts.setdefault(f"blk.{expert[2]}.ffn_{KINDS[expert[4]]}_exps.weight", []).append(
                (int(expert[3]), tensor)
            )
        elif expert:
            yield f"blk.{expert[2]}.ffn_{KINDS[expert[4]]}.{expert[3]}.weight", tensor
        elif name.startswith("blk."):
            yield name, tensor
        else:
            theirs = names.get_name(name, try_suffixes=(".weight", ".bias"))
            assert theirs is not None, name
            yield theirs, _changed(config, architecture, name, tensor)
    for name, parts in experts.items():
        yield name, torch.stack([tensor for _, tensor in sorted(parts, key=lambda part: part[0])])
    yield from _extra(config)


def _apart(tensors: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """gpt-oss's tensors of all experts and its sinks, under a file's names: gates and ups apart, outputs first."""
    for name, tensor in tensors.items():
        root = f"blk.{name.split('.')[2]}" if name.startswith("model.layers.") else ""
        if name.endswith(".sinks"):
            yield f"{root}.attn_sinks.weight", tensor
        elif found := JOINED.fullmatch(name):
            part = "bias" if found[2] else "weight"
            rows = tensor if found[2] else tensor.transpose(1, 2)
            kinds = ("gate", "up") if found[1] == "gate_up" else ("down",)
            for i, kind in enumerate(kinds):
                yield f"{root}.ffn_{kind}_exps.{part}", rows[:, i :: len(kinds)].contiguous()
        else:
            yield name, tensor


def _changed(config: dict[str, Any], architecture: str, name: str, tensor: Tensor) -> Tensor:
    if architecture.startswith("gemma") and name.endswith("norm.weight"):
        return tensor + 1
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}.get(name.split(".")[-2])
    if architecture not in PAIRED or heads is None:
        return tensor
    return tensor.reshape(heads, 2, -1, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape)


def _extra(config: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Tensors that stand for settings."""
    rope = config.get("rope_parameters") or {}
    if rope.get("rope_type") == "llama3":
        yield "rope_freqs.weight", torch.tensor(_llama3(rope, _head_dim(config)))
    if rope.get("long_factor"):
        yield "rope_factors_long.weight", torch.tensor(rope["long_factor"])
        yield "rope_factors_short.weight", torch.tensor(rope["short_factor"])


def _llama3(rope: dict[str, Any], size: int) -> list[float]:
    """A divisor for each frequency."""
    found = []
    for i in range(0, size, 2):
        turns = rope["original_max_position_embeddings"] / (2 * math.pi * rope["rope_theta"] ** (i / size))
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        kept = float(np.clip((turns - low) / (high - low), 0.0, 1.0))
        found.append(1 / ((1 - kept) / rope["factor"] + kept))
    return found


# ---- a whole model, as small as can be
def tiny(path: Path, vocabulary: Vocabulary, architecture: str = "llama", padding: int = 0, **extra: Any) -> Path:
    """A model of one layer whose embeddings are as many as there are tokens, and `padding` more; `extra`: keys below
    the architecture's name, with __ for dots (None: left out)."""
    writer = GGUFWriter(path, architecture)
    keys = {
        "block_count": 1,
        "context_length": 64,
        "embedding_length": 8,
        "feed_forward_length": 12,
        "attention.head_count": 2,
        "attention.head_count_kv": 1,
        "attention.layer_norm_rms_epsilon": 2.0**-20,
        **{key.replace("__", "."): value for key, value in extra.items()},
    }
    for key, value in keys.items():
        if value is not None:
            add(writer, f"{architecture}.{key}", value)
    vocabulary.add(writer)
    shapes = {"attn_norm": (8,), "attn_q": (8, 8), "attn_k": (4, 8), "attn_v": (4, 8), "attn_output": (8, 8),
              "ffn_norm": (8,), "ffn_gate": (12, 8), "ffn_up": (12, 8), "ffn_down": (8, 12)}  # fmt: skip
    named = {f"blk.0.{name}.weight": shape for name, shape in shapes.items()}
    generator = np.random.default_rng(0)
    rows = len(vocabulary.tokens) + padding
    for name, shape in {"token_embd.weight": (rows, 8), "output_norm.weight": (8,), **named}.items():
        writer.add_tensor(name, generator.standard_normal(shape).astype(np.float32))
    return finish(writer, path)
