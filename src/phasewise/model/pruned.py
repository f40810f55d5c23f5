"""A model of some of another one's layers: a shallower one with the same embeddings, norms and head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from phasewise.gguf.blocks import BlockMatrix
from phasewise.model.config import ModelConfig
from phasewise.model.layout import layout
from phasewise.model.weights import Tensors
from phasewise.ops.native.weights import DenseRows


def pruned(config: ModelConfig, keep: Sequence[int]) -> ModelConfig:
    """The architecture with these layers alone, increasing."""
    return replace(
        config, layers=len(keep), attention=tuple(config.attention[i] for i in keep),
        rope_of=tuple(config.rope_of[i] for i in keep), moe=tuple(config.moe[i] for i in keep),
    )  # fmt: skip


class Pruned:
    """The tensors of a checkpoint that these layers need, by the names that they have in a model of as many layers."""

    def __init__(self, tensors: Tensors, config: ModelConfig, keep: Sequence[int]) -> None:
        self.tensors = tensors
        self._names = _names(config, keep)
        self.where = {name: tensors.where[old] for name, old in self._names.items()}

    @property
    def directory(self) -> Path:
        return self.tensors.directory

    def shape(self, name: str) -> tuple[int, ...]:
        return self.tensors.shape(self._names[name])

    def dtype(self, name: str) -> torch.dtype:
        return self.tensors.dtype(self._names[name])

    def read(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        return self.tensors.read(self._names[name], dtype)

    def rows(self, name: str, dtype: torch.dtype) -> DenseRows:
        return self.tensors.rows(self._names[name], dtype)

    def blocks(self, name: str) -> BlockMatrix | None:
        return self.tensors.blocks(self._names[name])

    def let_go(self, tensor: Tensor) -> None:
        self.tensors.let_go(tensor)


def _names(config: ModelConfig, keep: Sequence[int]) -> Mapping[str, str]:
    """{a tensor's name in the shallower model: its name in the checkpoint}."""
    whole, few = layout(config), layout(pruned(config, keep))
    found: dict[str, str] = {}
    for key, parts in few.items():
        layer, _, rest = key.partition(".")
        old = f"{keep[int(layer)]}.{rest}" if rest else key
        found |= {name: before for (name, _), (before, _) in zip(parts, whole[old])}
    return found
