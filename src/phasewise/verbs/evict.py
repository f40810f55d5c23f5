"""evict: which cached rows are given up for good?"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from phasewise.verbs.slot import LayerRuntime

if TYPE_CHECKING:
    from phasewise.kv.format import KVShape
    from phasewise.request.request import Request
    from phasewise.step.plan import AttentionPlan
    from phasewise.step.span import Span


class Evict(LayerRuntime, ABC):
    """evict: which cached rows are given up for good?

    The verb's default binds to None, which is asked nothing. A method that is done when the prompt is says
    `phases=("prefill",)` in its traits: later rows then read what it has left as they would any KV, in native steps
    where the model has them. Runtimes inherit from this class: what they leave out is as it is here.
    """

    observes: int = 0
    """The number of last prompt rows whose queries it must see; these are never taken from a cached prefix."""

    most: Callable[[int], int] | None = None
    """(total) -> how many rows it ever leaves of a text of `total` tokens. A request then needs no memory for all of
    them, and its prompt comes in pieces. None: that is not known."""

    saliency: Callable[[Request, int, int, int], Tensor] | None = None
    """(request, layer, start, stop) -> float32 [stop - start]: how much the committed rows start .. stop - 1 matter.
    A store whose format is by saliency (`kv/format.py: BlockFormat`) asks as a block is packed, after `stayed`, and for
    all of a prompt's blocks at once."""

    def places(self, layer: int, shape: KVShape) -> int:
        """The number of KV heads of a layer whose kept positions are stored with the rows, for which memory is booked:
        1 if `keep` gives [K] there, 0 if nothing goes, otherwise all."""
        return shape.heads

    @abstractmethod
    def plan(self, span: Span) -> AttentionPlan:
        """What the rows of a span still see, and the attention weights that are wanted of them (`step/plan.py`).

        A window says what rows see before others are really dropped, so that a chunk equals single steps; a record
        takes weights. It depends on the span and its request alone, and is one object for as long as it is the same.
        """

    def due(self, request: Request) -> bool:
        """True if `keep` has work to do for this request now (asked after each commit)."""
        return False

    def keep(self, request: Request, layer: int) -> Tensor | Sequence[Tensor] | None:
        """Slots of the committed rows to keep, int64, increasing: [K], [H, K] or one [K] per head; None = all."""
        return None


def retain(scores: Tensor, keep: int, recent: int = 0) -> Tensor:
    """Slots of the `keep` best scores [H, N] per head, and the `recent` slots after all of them.

    -> increasing [H, min(keep, N) + recent]. Of equal scores the earlier slot stays, on every device.
    """
    heads, n = scores.shape
    best = scores.sort(stable=True, dim=-1, descending=True).indices[:, :keep].sort(-1).values
    last = torch.arange(n, n + recent, device=scores.device).expand(heads, -1)
    return torch.cat((best, last), -1)
