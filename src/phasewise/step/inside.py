"""The context that the reads of one forward share: counters, and what is worked out once for all layers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from phasewise.model.model import Model
    from phasewise.request.counters import Counters


class Inside:
    """Alive for one forward. `masks`: a span's mask is the same at every layer of one window. `notes`: of methods."""

    __slots__ = ("counters", "masks", "model", "notes")

    def __init__(self, model: Model, counters: Counters) -> None:
        self.model, self.counters = model, counters
        self.masks: dict[Any, Tensor] = {}
        self.notes: dict[Any, Any] = {}

    def count(self, counter: str, n: int) -> None:
        self.counters.count(counter, n)
