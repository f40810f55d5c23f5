"""A model's zero-padded twin: every width `factor` times as large, the same tokens, a large model's cost.

The hidden state is written `factor` times over and read once: embeddings and what layers add repeat their rows, all
that reads has zeros for the repetitions, and so has the last norm. The mean square that a norm divides by is that of
the original, so norms and their epsilon stay as they are; new heads and inner units are zeros. Every weight is
therefore a copy or a zero, whatever the factor and the type: no weight is rounded. Sums run over more terms, perhaps in
another order, so logits agree to float tolerance, not to the bit.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from phasewise.errors import UnsupportedModel, UserError
from phasewise.model.config import ModelConfig
from phasewise.model.layout import layout
from phasewise.model.parse import parse_config
from phasewise.model.quantisation import require_unquantised
from phasewise.model.raw import RawConfig
from phasewise.model.source import Source
from phasewise.model.weights import INDEX, SINGLE, Tensors

LEAST, MOST = 2, 8
FAMILIES = ("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "smollm3")
WHY_NOT = {
    "phi3": "its queries, keys and values lie in one tensor",
    "gpt_oss": "its experts add biases to what is repeated, and each layer has one tensor for all of them",
    "olmo2": "its norms of queries and keys run over all heads, new ones included",
    "gemma2": "it multiplies its embeddings by the root of the width",
    "gemma3_text": "it multiplies its embeddings by the root of the width",
}
REPEATED = {"embed": 1, "o": 0, "down": 0, "before_attention": 0, "before_mlp": 0}
"""Tensors of the layout, by the last part of their names, that are repeated along a dimension; all else is padded."""
SHARD_BYTES = 1 << 30  # a file's; what is in memory at a time


@dataclass(frozen=True)
class WidenedTensor:
    """One tensor of the twin: where it comes from, and what it becomes."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    repeated: int | None  # along this dimension

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def of(self, tensor: Tensor) -> Tensor:
        """The original tensor, repeated where the twin is wider and the rest of it zeros."""
        wide = torch.zeros(self.shape, dtype=tensor.dtype)
        place = [slice(size) for size in tensor.shape]
        if self.repeated is None:
            wide[tuple(place)] = tensor
            return wide
        size = tensor.shape[self.repeated]
        for start in range(0, self.shape[self.repeated], size):
            place[self.repeated] = slice(start, start + size)
            wide[tuple(place)] = tensor
        return wide


def widen(files: Source, target: Path, factor: int) -> int:
    """Write the twin's weights and config.json into `target`; returns the bytes of its weights.

    Raises UserError for a factor out of range, a family whose layers cannot be padded so, and a target that holds a
    model already or is on a disk too small.
    """
    if not LEAST <= factor <= MOST:
        raise UserError(f"factor={factor}: choose a whole number from {LEAST} to {MOST}")
    raw = files.settings()
    require_unquantised(raw)
    config = parse_config(raw)
    if config.family not in FAMILIES:
        why = WHY_NOT.get(config.family, "widening this family is not supported")
        known = ", ".join(FAMILIES)
        raise UnsupportedModel(f"{files.path}: a {config.family} cannot be widened: {why}. Choose one of {known}.")
    values, tensors = _settings(raw, config, factor), files.tensors()
    shards = list(_shards(_pieces(config, parse_config(RawConfig(values, files.path)), tensors)))
    total = sum(piece.nbytes for shard in shards for piece in shard)
    _make_room(target, total)
    where: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = SINGLE if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        _save(target / name, shard, tensors)
        where.update((piece.name, name) for piece in shard)
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": where}
        (target / INDEX).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
    (target / "config.json").write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")  # last: now it is one
    return total


def _settings(raw: RawConfig, config: ModelConfig, factor: int) -> dict[str, Any]:
    sizes = {
        "hidden_size": config.hidden,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "intermediate_size": config.intermediate,
    }
    if config.family == "qwen3_moe":
        sizes["moe_intermediate_size"] = raw.size("moe_intermediate_size", 768)
    return {**raw.values, **{name: size * factor for name, size in sizes.items()}, "head_dim": config.head_dim}


def _pieces(config: ModelConfig, wide: ModelConfig, tensors: Tensors) -> Iterator[WidenedTensor]:
    names = layout(config)
    for key, parts in layout(wide).items():
        last = key.removesuffix(".bias").rpartition(".")[2]
        for (name, shape), (_, before) in zip(parts, names[key], strict=True):
            if name not in tensors.where:
                raise UserError(f"{tensors.directory} has no tensor {name}, which its settings ask for")
            if tensors.shape(name) != before:
                raise UserError(f"{name} in {tensors.directory} has the shape {tensors.shape(name)}, not {before}")
            yield WidenedTensor(name, shape, tensors.dtype(name), REPEATED.get(last))


def _shards(pieces: Iterator[WidenedTensor]) -> Iterator[list[WidenedTensor]]:
    shard: list[WidenedTensor] = []
    for piece in pieces:
        if shard and sum(each.nbytes for each in shard) + piece.nbytes > SHARD_BYTES:
            yield shard
            shard = []
        shard.append(piece)
    yield shard


def _make_room(target: Path, total: int) -> None:
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(f"{target} is not empty: name another folder, or empty it")
    target.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(target).free
    if total > free:
        raise UserError(f"the twin has {total / 1e9:.1f} GB of weights, and {target} has room for {free / 1e9:.1f} GB: "
                        "name a folder on another disk, or a smaller factor")  # fmt: skip


def _save(path: Path, shard: list[WidenedTensor], tensors: Tensors) -> None:
    made = {}
    for piece in shard:
        tensor = tensors.read(piece.name)
        made[piece.name] = piece.of(tensor)
        tensors.let_go(tensor)
    save_file(made, str(path), metadata={"format": "pt"})
