"""attend: what may one query row read?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from phasewise.step.plan import AttentionPlan
    from phasewise.step.span import Span


class Attend(Protocol):
    """attend: what may one query row read? What is cached stays as it is.

    Its dataclass says in `phases` in which phases it acts, ("prefill", "decode") or one of them; the verb's default
    acts in the others.

    Optional:
        everything: bool  -- its plans never choose: rows read all that they see, with the scores that they have
        shares_reads: bool  -- it reads what several requests hold in common once for all
        recalls: bool  -- of the method: it need not see a prompt's first rows, so they may be given (`Decode.given`)
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

    def plan(self, span: Span) -> AttentionPlan:
        """What the rows of a span may read in every layer (`step/plan.py`).

        It depends on the span and its request alone. Return one object for as long as the plan is the same: spans of
        one plan are read together, and what kernels need of it is prepared once.
        """
        ...
