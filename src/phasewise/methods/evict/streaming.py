"""Attention sinks and a moving window: long texts in constant memory (StreamingLLM, arXiv 2309.17453).

Promises dense attention's results until a row has more than `sinks + window` rows to see, and bytes that never grow
after, however long the text. It is not a longer context: what has left the window is gone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from phasewise.methods.evict._windows import EVERY as EVERY
from phasewise.methods.evict._windows import Window
from phasewise.request.request import Request
from phasewise.step.read import Read, View
from phasewise.step.sight import Sight
from phasewise.verbs.host import ENDLESS, Host


@dataclass(frozen=True)
class Streaming:
    """A row at position t sees the first `sinks` rows and the last `window` rows, itself included; so in prompts too.

    With positions "cache", the paper's, a row's distance to a sink is counted within the cache: the window keeps its
    rotation and the sinks are read as if they stood right before it. With "text" every row keeps its place in the text,
    which is meaningful within the trained length only; so the model's context ends there. With "cache", or without
    sinks, texts go on beyond it, prompts as well as answers, as long as sinks and window fit into it. Left out: models
    trained with a sink of their own; models with windows of their own take the open path.
    """

    sinks: int = 4
    window: int = 1020
    positions: Literal["cache", "text"] = "cache"

    paper: ClassVar[str] = "arXiv 2309.17453"
    guarantee: ClassVar[str] = "lossy"
    needs: ClassVar[str] = "nothing"
    neutral: ClassVar[dict[str, object]] = {"window": 1 << 30}
    tight: ClassVar[dict[str, object]] = {"sinks": 2, "window": 10}
    budgets: ClassVar[tuple[dict[str, object], ...]] = ({}, {"window": 508}, {"window": 252}, {"window": 124})

    def __post_init__(self) -> None:
        Window("streaming", self.sinks, self.window)  # raises UserError

    def bind(self, host: Host) -> _Streaming:
        return _Streaming(self)


class _Streaming:
    observes = 0

    def __init__(self, knobs: Streaming) -> None:
        self.sinks, self.window = knobs.sinks, knobs.window
        self.near = Window("streaming", knobs.sinks, knobs.window)
        self.shifts = knobs.positions == "cache" and knobs.sinks > 0
        self.sight = Sight(self.sinks, self.window, self.shifts)

    def observe(self, read: Read) -> None:
        """Needs no scores."""

    def view(self, read: Read) -> View | None:
        if max(read.span.positions) < self.sinks + self.window:
            return None
        at, rows = read.q_positions, read.part.positions  # [R], [1 | h, N]
        mask = self.near.sees(rows, at)
        if not self.shifts:
            return View(mask)
        beyond = (at - (self.sinks + self.window - 1)).clamp_min(0)  # [R]: rows given up before this one
        return View(mask, (torch.nonzero(rows[0] < self.sinks)[:, 0], beyond))

    def most(self, total: int) -> int:
        return self.sinks + self.window + EVERY

    def reach(self, context: int) -> int:
        """No row sees another as further away than the window is long."""
        near = self.shifts or not self.sinks
        return ENDLESS if near and self.sinks + self.window <= context else context

    def due(self, request: Request) -> bool:
        return self.near.due(request)

    def keep(self, request: Request, layer: int) -> Tensor | None:
        assert request.kv is not None
        parts = request.kv.layers[layer].read()
        if not parts:
            return None  # a layer that no row will run again
        return self.near.drop(request, parts[0].positions[0])  # the same for all heads
