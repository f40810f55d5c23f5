"""Evict methods of sinks and a window: which rows may go, from positions (`step/plan.py` says what rows see)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from phasewise.errors import UserError
from phasewise.kv.format import KVShape
from phasewise.request.request import Request
from phasewise.step.plan import Window

EVERY = 32  # rows that may lie idle before they are dropped: dropping moves the window, so it is done in lots


def check(name: str, sinks: int, size: int) -> None:
    if sinks < 0 or size < 1:
        raise UserError(f"{name}: sinks={sinks} must be at least 0, window={size} at least 1")


@dataclass(frozen=True)
class Dropping:
    """Gives up the rows that no later row sees through a window. `name`: of the drawer that says which are dropped."""

    name: str
    window: Window

    def due(self, request: Request) -> bool:
        """Whether enough rows have left the window since some were dropped; with a stride, also once some are followed
        by one that stays."""
        window = self.window
        first, since = self._first(request), int(request.state.get(self.name, window.sinks))
        if not window.stride:
            return first - since >= EVERY
        idle = first - since - self._striped(first) + self._striped(since)
        at = since % (window.block * window.stride)
        leaves = since + max(0, window.block - at)  # the first that does not stay
        return idle >= EVERY or (idle > 0 and window.staying(leaves) < first)

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
        return torch.nonzero(self.window.stays(rows) | (rows >= first))[:, 0]

    def _striped(self, position: int) -> int:
        """How many positions before this one lie in blocks that stay."""
        whole, rest = divmod(position, self.window.block * self.window.stride)
        return whole * self.window.block + min(rest, self.window.block)

    def _first(self, request: Request) -> int:
        """The first position of the window of the next row."""
        return request.computed - self.window.size + 1
