"""Members that the runtimes of several verbs have in common."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from phasewise.kv.drawers import Room
    from phasewise.kv.format import KVShape
    from phasewise.kv.token_rows import TokenRows
    from phasewise.model.lowrank import Delta
    from phasewise.step.span import Span


class SlotRuntime:
    """What fills a slot of a phase: the runtime of a decode, attend, evict or skip method.

    What a runtime leaves out is as it is here. A member that is None is never asked.
    """

    drawer: Callable[[int, KVShape, Room], int] | None = None
    """(layer, shape, room) -> bytes at most that lie in requests' drawers from step to step for a layer with such room.
    They are booked with its rows (kv/drawers.py)."""

    beside: Callable[[int, KVShape, int], int] | None = None
    """(layer, shape, end) -> bytes at most that it keeps beside a request's rows of this layer (`KVPart.derived`) while
    their positions lie below `end`. They are booked with the rows."""

    token_rows: Sequence[TokenRows] = ()
    """Of a decode method: what it keeps of each token in requests' drawers, and what prefix hits must bring along with
    the KV (kv/token_rows.py)."""

    def reach(self, context: int) -> int:
        """Positions that a text may have, where the model's context is `context`; ENDLESS where it sets no bound."""
        return context


class LayerRuntime(SlotRuntime):
    """The runtime of an attend, evict or skip method, which acts inside the model's layers."""

    delta: Delta | None = None
    """Low-rank weights (model/lowrank.py) that the rows of its phases, and no others, run with. One method of a phase
    may bring some."""

    stayed: Callable[[Span, int | Sequence[int]], None] | None = None
    """(span, keep) is told as rows are committed, before `Evict.due`: which rows of a span stay, the first so many or a
    path. Rows that were recorded and are not told of must leave no trace; those of a step that failed come again.
    `step/trail.py` keeps a state along the rows that stay."""
