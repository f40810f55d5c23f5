"""attend: what may one query row read?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

if TYPE_CHECKING:
    from phasewise.step.read import Read


class Attend(Protocol):
    """attend: what may one query row read? What is cached stays as it is.

    Its dataclass says in `phases` in which phases it acts, ("prefill", "decode") or one of them; the verb's default
    acts in the others.

    Optional:
        everything: bool  -- it always reads exactly all that is visible, so whole steps may run without asking it
        recalls: bool  -- of the method: it need not see a prompt's first rows, so they may be given (`Decode.given`)
        commons(spans: Sequence[Span]) -> Sequence[Common]  -- beside `everything`: what spans read once for all
        looks(span: Span) -> bool  -- whether it may choose anything for this span; if not, its step need not be halved.
            It must depend on the span and its request alone
        choice: Choice  -- what `__call__` does, said as data (`step/choice.py`, `step/lists.py`): whole steps then run
            without asking it for single rows, while draft trees, replays and what else is not as simple still ask. Both
            must choose alike, over what lies beside the rows by the same name, and `looks` say what `choice.acts` does
        bias: FirstBias  -- what `__call__` does, where that is a number added to the scores of the first token
            (`step/bias.py`): whole steps then run without asking it, for rows of any kind; it is still asked where an
            evict method acts, or heads keep unequally many rows
        beside(layer: int, shape: KVShape, end: int) -> int  -- the bytes at most that it keeps (`Part.derived`) beside
            a request's rows of this layer while their positions lie below `end`: booked in the KV budget with the rows
        stayed(span: Span, keep: int | Sequence[int]) -> None  -- told which rows of a span are committed, as an evict
            method is
        whole: bool  -- as of an evict method: prompts come in one piece
        delta: Delta  -- as of a skip method: low-rank weights that the rows of its phases, and no others, run with. Of
            the methods of a phase one may bring some
        again(request: Request, computed: int) -> int  -- of a runtime that acts on decoded rows: how many of the last
            rows are given up and computed once more, now that those below `computed` are there and before the new
            tokens are known; the rows come back as a replay does. None: never
        until(request: Request) -> int | None  -- the position that no draft may reach, as something hangs on the rows
            before it once they stay: these are computed again (`again`), or choose; None: there is none
    """

    def __call__(self, reads: Sequence[Read]) -> Sequence[Tensor | None]:
        """One output [R, hq, D] per read; a row's result depends on that row and its committed prefix alone. None: what
        attention over all that is visible gives. Queries are overwritten after the call."""
        ...
