"""The context that the reads of one forward share: counters, and what is worked out once for all layers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from phasewise.model.model import Model
    from phasewise.request.counters import Counters


class Inside:
    """Alive for one forward. `masks`: a span's mask is the same at every layer of one window. `notes`: of methods.
    `x` [T, d]: what entered the layer under way; a read's rows are those at `Read.at`."""

    __slots__ = ("counters", "masks", "model", "notes", "x")

    def __init__(self, model: Model, counters: Counters) -> None:
        self.model, self.counters = model, counters
        self.masks: dict[Any, Tensor] = {}
        self.notes: dict[Any, Any] = {}
        self.x: Tensor | None = None

    def count(self, counter: str, n: int) -> None:
        self.counters.count(counter, n)
