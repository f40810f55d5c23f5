"""All rows of a step end to end."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from phasewise.step.span import Span


class Batch:
    """Rows of all spans end to end, never padded. `numbers` int64 [2 T]: their tokens, then their positions."""

    __slots__ = ("_device", "end", "numbers", "rows", "spans")

    def __init__(self, spans: Sequence[Span], device: torch.device | str = "cpu") -> None:
        self.spans = list(spans)
        tokens: list[int] = []
        positions: list[int] = []
        for span in self.spans:
            span.start = len(tokens)
            tokens += span.tokens
            positions += span.positions
        self.rows = len(tokens)
        self.end = 1 + max(positions)  # no position is as large
        self.numbers = array("q", tokens + positions)
        self._device = device

    @property
    def tokens(self) -> Tensor:
        """int64 [T]"""
        return self._tensor()[: self.rows]

    @property
    def positions(self) -> Tensor:
        """int64 [T]"""
        return self._tensor()[self.rows :]

    def carry(self, x: Tensor, kept: dict[int, Tensor]) -> None:
        """After a step with rows `x` [T, d] and taps `kept`: slices that run part of the depth take their state and
        their taps along from step to step."""
        for span in self.spans:
            if span.layers is None:
                continue
            for i in kept:
                if i >= span.layers[0]:
                    span.taps[i] = kept[i][span.slice]
                elif i in span.taps:
                    kept[i] = kept[i].clone()  # layers may share one tensor
                    kept[i][span.slice] = span.taps[i]
            span.hidden = x[span.slice].clone()

    def _tensor(self) -> Tensor:
        return torch.frombuffer(self.numbers, dtype=torch.int64).to(self._device)  # holds on to the array
