"""Some first rows and a moving window, of all heads or of some: what methods that keep these and drop the rest share.

A row at position t sees positions below `sinks` and the last `window` ones up to its own. Rows that no later row will
see are hidden at once and dropped in lots, since dropping moves a layer's rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from phasewise.errors import UserError
from phasewise.request.request import Request

EVERY = 32  # rows that may lie idle before they are dropped


@dataclass(frozen=True)
class Window:
    """`name`: whose drawer says up to where rows have been dropped."""

    name: str
    sinks: int
    window: int

    def __post_init__(self) -> None:
        if self.sinks < 0 or self.window < 1:
            raise UserError(f"{self.name}: sinks={self.sinks} must be at least 0, window={self.window} at least 1")

    def sees(self, rows: Tensor, at: Tensor) -> Tensor:
        """Whether queries at positions [R] see rows at positions [1 | h, N] before them: bool [1 | h, R, N]."""
        rows = rows[:, None]
        return (rows < self.sinks) | (rows > at[:, None] - self.window)

    def first(self, request: Request) -> int:
        """The first position behind the sinks that the next row will still see."""
        return request.computed - self.window + 1

    def due(self, request: Request) -> bool:
        """Whether a lot of rows lies idle."""
        return self.first(request) - int(request.state.get(self.name, self.sinks)) >= EVERY

    def drop(self, request: Request, rows: Tensor) -> Tensor:
        """Of rows at positions [N], the slots that stay; it is noted that the others go."""
        first = self.first(request)
        request.state[self.name] = first
        return torch.nonzero((rows < self.sinks) | (rows >= first))[:, 0]
