"""A LoRA adapter as part of a recipe: its requests run with it, in the same steps as those of others and of none."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from phasewise.errors import BudgetError, UserError
from phasewise.model.lora import Adapter, read
from phasewise.model.lowrank import Delta
from phasewise.verbs.traits import Traits

if TYPE_CHECKING:
    from phasewise.kv.prefix import PrefixCache
    from phasewise.model.config import ModelConfig
    from phasewise.model.model import Model

LORA = "lora"  # beside the verbs of a recipe's methods


@dataclass(frozen=True)
class Lora:
    """An adapter by its folder, an absolute path, and the hash of its files. `held`: what was read of it, where that is
    at hand; another process, perhaps on another host, reads it again, and refuses files that have changed."""

    name: str
    path: str
    digest: str
    rank: int
    held: Adapter | None = field(default=None, compare=False, repr=False)

    guarantee: ClassVar[str] = "exact"  # that of the adapter's own model
    neutral: ClassVar[dict[str, object]] = {}

    @classmethod
    def read(cls, name: str, path: str, config: ModelConfig, most_rank: int) -> Lora:
        """The adapter in a folder. Raises UserError for one that does not fit the model."""
        found = read(Path(path).expanduser(), config, most_rank)
        return cls(name, str(Path(path).expanduser().absolute()), found.digest, found.rank, found)

    @property
    def traits(self) -> Traits:
        return Traits(LORA, low_rank=True)

    def bare(self) -> Lora:
        """Itself without what was read."""
        return replace(self, held=None)

    def text(self) -> list[Any]:
        """Plain data, from which `of` makes an equal one elsewhere."""
        return [self.name, self.path, self.digest, self.rank]

    @classmethod
    def of(cls, text: Iterable[Any]) -> Lora:
        return cls(*text)


@dataclass(frozen=True, slots=True)
class LoadedLora:
    """An adapter's weights in an engine, and their bytes."""

    delta: Delta
    n_bytes: int


class Loras:
    """The adapters of one engine, each loaded once however many recipes have it. Their bytes count as the KV budget's
    until the last of these recipes has gone."""

    def __init__(self, model: Model, prefixes: PrefixCache) -> None:
        self._model, self._prefixes = model, prefixes
        self._loaded: dict[Lora, LoadedLora] = {}

    def load(self, lora: Lora) -> LoadedLora:
        """Raises UserError for files that have changed or gone, BudgetError where the budget has no room."""
        if lora not in self._loaded:
            self._loaded[lora.bare()] = self._load(lora)
        return self._loaded[lora]

    def keep(self, used: Iterable[LoadedLora | None]) -> None:
        """Give back all that nobody uses."""
        kept = {id(each) for each in used}
        for lora, loaded in list(self._loaded.items()):
            if id(loaded) not in kept:
                del self._loaded[lora]
                self._book(-loaded.n_bytes)

    def _load(self, lora: Lora) -> LoadedLora:
        model = self._model
        found = lora.held or read(Path(lora.path), model.config, lora.rank)
        if found.digest != lora.digest:
            raise UserError(f"{lora.path} has changed since the adapter {lora.name!r} was read: load it again")
        n_bytes = sum(tensor.numel() for tensor in found.tensors.values()) * model.dtype.itemsize
        if not self._prefixes.room(n_bytes):
            raise BudgetError(
                f"the adapter {lora.name!r} takes {n_bytes:,} bytes, and {max(0, self._prefixes.ledger.free):,} of the "
                "KV budget are free: raise --kv-bytes, or unload another adapter"
            )
        _refuse_overflow(lora, found.tensors, model.dtype)
        loaded = LoadedLora(Delta(found.tensors, model.dtype, model.device), n_bytes)
        self._book(n_bytes)
        return loaded

    def _book(self, n_bytes: int) -> None:
        ledger = self._prefixes.ledger
        ledger.add(n_bytes)
        ledger.resident += n_bytes


def _refuse_overflow(lora: Lora, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> None:
    """Raise UserError where a value is beyond what `dtype` can say."""
    most = torch.finfo(dtype).max
    for name, tensor in tensors.items():
        if tensor.abs().max() > most:
            raise UserError(f"the adapter {lora.name!r} has values in {name} beyond those of {dtype}: load the model "
                            "with --dtype float32 or bfloat16")  # fmt: skip
