"""Attention sinks and a moving window: long texts in constant memory (StreamingLLM, arXiv 2309.17453).

Promises dense attention's results until a row has more than `sinks + window` rows to see, and bytes that never grow
after, however long the text. It is not a longer context: what has left the window is gone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from phasewise.kv.format import KVShape
from phasewise.methods.evict._windows import EVERY, Dropping, check
from phasewise.request.request import Request
from phasewise.step.plan import EVERYTHING, AttentionPlan, Window
from phasewise.step.span import Span
from phasewise.verbs.evict import Evict
from phasewise.verbs.host import ENDLESS, Host
from phasewise.verbs.method import Method
from phasewise.verbs.traits import Traits


@dataclass(frozen=True)
class Streaming(Method):
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
    traits: ClassVar[Traits] = Traits("evict", frees_rows=True)
    tight: ClassVar[dict[str, object]] = {"sinks": 2, "window": 10}
    budgets: ClassVar[tuple[dict[str, object], ...]] = ({}, {"window": 508}, {"window": 252}, {"window": 124})

    def __post_init__(self) -> None:
        check("streaming", self.sinks, self.window)

    def bind(self, host: Host) -> _Streaming:
        return _Streaming(self)


class _Streaming(Evict):
    def __init__(self, knobs: Streaming) -> None:
        self.shifts = knobs.positions == "cache" and knobs.sinks > 0
        self.window = Window(knobs.sinks, knobs.window, rebased=self.shifts)
        self._plan, self._dropping = AttentionPlan(window=self.window), Dropping("streaming", self.window)

    def plan(self, span: Span) -> AttentionPlan:
        return self._plan if self.window.hides(span) else EVERYTHING

    def due(self, request: Request) -> bool:
        return self._dropping.due(request)

    def keep(self, request: Request, layer: int) -> Tensor | None:
        return self._dropping.keep(request, layer)

    def places(self, layer: int, shape: KVShape) -> int:
        return self._dropping.places(layer, shape)

    def most(self, total: int) -> int:
        return self.window.rows + EVERY

    def reach(self, context: int) -> int:
        """No row sees another as further away than the window is long."""
        near = self.shifts or not self.window.sinks
        return ENDLESS if near and self.window.rows <= context else context
