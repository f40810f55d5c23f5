"""What evict methods of sinks and a window share: who sees what, from positions, and which rows may go.

A row at position t sees the first `sinks` positions and the last `window` ones, its own included; with a `stride`, also
every stride-th block of `block` positions, counted from the first one: a block that has left the window without being
one of those never comes back.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from phasewise.errors import UserError
from phasewise.kv.buffer import KVShape
from phasewise.request.request import Request
from phasewise.step.span import Span

EVERY = 32  # rows that may lie idle before they are dropped: dropping moves the window, so it is done in lots


@dataclass(frozen=True)
class Window:
    """`name`: of the drawer that says which rows a request has dropped."""

    name: str
    sinks: int
    window: int
    stride: int = 0  # 0: no blocks
    block: int = 1

    def __post_init__(self) -> None:
        if self.sinks < 0 or self.window < 1:
            raise UserError(f"{self.name}: sinks={self.sinks} must be at least 0, window={self.window} at least 1")

    @property
    def rows(self) -> int:
        """As many rows are seen whole, however they lie."""
        return self.sinks + self.window

    def hides(self, span: Span) -> bool:
        """Whether a row of the span does not see all before it."""
        return max(span.positions) >= self.rows

    def seen(self, at: Tensor, rows: Tensor) -> Tensor:
        """Whether the position `at` sees that of `rows`, which is not behind it; bool, broadcast."""
        return self.stays(rows) | (rows > at - self.window)

    def stays(self, rows: Tensor) -> Tensor:
        """Whether those at these positions are seen from anywhere."""
        stays = rows < self.sinks
        return stays | (rows // self.block % self.stride == 0) if self.stride else stays

    def staying(self, position: int) -> int:
        """The first position from this one on that is seen from anywhere; of a window with a stride."""
        apart = self.block * self.stride
        here = position < self.sinks or position % apart < self.block
        return position if here else -(-position // apart) * apart

    def due(self, request: Request) -> bool:
        """Whether enough rows have left the window since some were dropped; with a stride, also once some are followed
        by one that stays."""
        first, since = self._first(request), int(request.state.get(self.name, self.sinks))
        if not self.stride:
            return first - since >= EVERY
        idle = first - since - self._striped(first) + self._striped(since)
        at = since % (self.block * self.stride)
        leaves = since + max(0, self.block - at)  # the first that does not stay
        return idle >= EVERY or (idle > 0 and self.staying(leaves) < first)

    def keep(self, request: Request, layer: int) -> Tensor | None:
        """The slots of the layer's rows that rows to come may see; they are noted as all that is left."""
        assert request.kv is not None
        parts = request.kv.layers[layer].read()
        if not parts:
            return None  # a layer that no row will run again
        return self.drop(request, parts[0].positions[0])  # the same for all heads

    def places(self, layer: int, shape: KVShape) -> int:
        """The same rows go in all heads."""
        return 1

    def drop(self, request: Request, rows: Tensor) -> Tensor:
        """Of rows at positions [N], the slots that rows to come may see; they are noted as all that is left."""
        first = request.state[self.name] = self._first(request)
        return torch.nonzero(self.stays(rows) | (rows >= first))[:, 0]

    def _striped(self, position: int) -> int:
        """How many positions before this one lie in blocks that stay."""
        whole, rest = divmod(position, self.block * self.stride)
        return whole * self.block + min(rest, self.block)

    def _first(self, request: Request) -> int:
        """The first position of the window of the next row."""
        return request.computed - self.window + 1
