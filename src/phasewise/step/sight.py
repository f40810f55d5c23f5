"""What the rows of a phase see of the cached ones, said as data: then nobody has to be asked inside a layer."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING

from phasewise.kv.unequal import Narrow
from phasewise.ops.native.stack import StackSpan

if TYPE_CHECKING:
    from phasewise.kv.contiguous import ContiguousView
    from phasewise.step.span import Span


@dataclass(frozen=True, slots=True)
class Sight:
    """A row sees the first `sinks` positions and the last `window` ones, its own included.

    `moved`: a row that has lost some of those between reads the sinks as if it stood at position sinks + window - 1,
    so that they lie right before its window. `heads`: it sees no more only in those KV heads that this says yes to, by
    layer, and everything in the others; these may hold unequally many rows, and none is `moved`. Not `prompts`: rows of
    a prompt see everything.
    """

    sinks: int
    window: int
    moved: bool = False
    heads: tuple[tuple[bool, ...], ...] | None = None
    prompts: bool = True

    def hides(self, span: Span) -> bool:
        """Whether a row of the span does not see all before it."""
        positions = span.positions
        last = positions[-1] if isinstance(positions, range) else max(positions)
        return last >= max(self.sinks + self.window, 0 if self.prompts else span.request.prompt_len)

    def natively(self, span: Span, flat: ContiguousView, whole: StackSpan) -> StackSpan | None:
        """`whole`, which sees everything, as it is with this sight; `near` is still a position, no place in the turns.

        None where the native step cannot tell by slots what is seen: the cached rows are others than the sinks and then
        consecutive positions, or the span's own rows lie further apart than the window reaches.
        """
        first = span.positions[0]
        if span.first or not (self.prompts or first >= span.request.prompt_len):
            return None
        heads = self.heads if self.heads is None or span.walk is None else tuple(self.heads[i] for i in span.walk)
        narrow = Narrow(self.sinks, self.window, heads)
        if (heads is None and flat.unequal is not None) or not flat.lined(narrow, first):
            return None
        return self.over(narrow, span, flat, whole)

    def over(self, narrow: Narrow, span: Span, flat: ContiguousView, whole: StackSpan) -> StackSpan | None:
        """Likewise, over cached rows that are known to be `narrow`'s sinks and then consecutive positions."""
        lost, seats = span.positions[0] - flat.n, None  # a row's position is that much larger than its slot
        if span.sees is not None:
            seats = array("q", (position - lost for position in span.positions))
            if max(seats) - min(seats) >= self.window:
                return None
        elif span.positions[-1] - span.positions[0] != span.rows - 1:
            return None
        if narrow.heads is not None:
            lies = flat.narrowed(narrow)
            missing = lies.missing + lies.unseen(flat.n + 1 - self.window)
            return whole._replace(planes=0, unequal=lies.address, missing=missing, seats=seats, narrow=True)
        near = self.sinks + self.window - 1 if self.moved and self.sinks else -1
        beyond = max(0, self.sinks + self.window - lost)
        return whole._replace(window=self.window, sinks=self.sinks, near=near, beyond=beyond, seats=seats)
