"""Blocks on a stride in native steps: which slots a row sees beside its window, as long as a number can say that."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from phasewise.kv.contiguous import ContiguousView
from phasewise.kv.unequal import Narrow, by_head
from phasewise.methods.evict._windows import Window
from phasewise.ops.native.stack import StackSpan
from phasewise.request.request import Request
from phasewise.step.sight import Sight
from phasewise.step.span import Span


@dataclass(frozen=True, slots=True)
class Stripes:
    """Stands for a `Sight` (step/sight.py) where `window` has a stride: that much is seen in the KV heads that `heads`
    says yes to, by layer, all of which give up the same rows.

    Rows that stay for good lie in front, then those that have left the window and wait to be dropped, then the window:
    a row sees so many of the first slots, and of the last ones. Not so where rows that stay have left the window behind
    others that wait: then `view` is asked. `Window.due` sees to it that a single row never finds that.
    """

    window: Window
    heads: tuple[tuple[bool, ...], ...]

    def hides(self, span: Span) -> bool:
        """Whether a row of the span does not see all before it."""
        return self.window.hides(span)

    def natively(self, span: Span, flat: ContiguousView, whole: StackSpan) -> StackSpan | None:
        """As of a `Sight`."""
        if span.first:
            return None
        heads = self.heads if span.walk is None else tuple(self.heads[i] for i in span.walk)
        front, until = self._front(span.request, flat, heads, span.positions[0])
        if max(span.positions) >= until:
            return None
        near = Narrow(front, self.window.window, heads)
        return Sight(near.sinks, near.window).over(near, span, flat, whole)

    def _front(
        self, request: Request, flat: ContiguousView, heads: tuple[tuple[bool, ...], ...], position: int
    ) -> tuple[int, int]:  # fmt: skip
        """How many of the first slots a row at `position`, behind all that are committed, sees for good; and the first
        position that does not see just those and a window. (0, 0): rows lie otherwise."""
        drawer = f"{self.window.name} front"
        lost = position - flat.n, request.state.get(self.window.name)
        known: tuple[object, int, int] | None = request.state.get(drawer)
        if known is None or known[0] != lost or position >= known[2]:
            known = request.state[drawer] = (lost, *self._found(flat, heads, position))
        return known[1:]

    def _found(self, flat: ContiguousView, heads: tuple[tuple[bool, ...], ...], position: int) -> tuple[int, int]:
        held: Tensor | None = None
        for layer, narrow in zip(flat.layers, heads):
            for (slab, place), cut in zip(by_head(layer), narrow):
                if not cut:
                    continue
                at = slab.positions
                rows = torch.arange(slab.n) if at is None else at[min(place, slab.said - 1), : slab.n]
                if slab.base or not (held is None or torch.equal(held, rows)):
                    return 0, 0
                held = rows
        if held is None:
            return 0, 0
        n, stays = len(held), self.window.stays(held)
        front = n if bool(stays.all()) else int(stays.to(torch.uint8).argmin())
        if not torch.equal(held[front:], torch.arange(position - n + front, position)):
            return 0, 0
        behind = position if front == n else int(held[front])  # what comes after those in front
        return front, self.window.staying(behind) + self.window.window
