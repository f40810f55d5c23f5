"""evict: which cached rows are given up for good?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from phasewise.request.request import Request
    from phasewise.step.plan import AttentionPlan
    from phasewise.step.span import Span


class Evict(Protocol):
    """evict: which cached rows are given up for good?

    The verb's default binds to None, which is asked nothing. A method that is done when the prompt is says `phases =
    ("prefill",)`: later rows then read what it has left as they would any KV, in native steps where the model has them.

    Optional:
        most(total: int) -> int  -- how many rows it ever leaves of a text of `total` tokens, where that is known: a
            request then needs no memory for all of them, and its prompt comes in pieces
        stayed(span: Span, keep: int | Sequence[int]) -> None  -- told, as its rows are committed and before `due`,
            which of a span stay: the first so many, or a path. Rows that were recorded and are not told of must leave
            no trace; those of a step that failed come again (`step/trail.py` keeps a state along those that stay)
        saliency(request: Request, layer: int, start: int, stop: int) -> Tensor  -- of a method that comes with a store
            whose codec ranks rows (`kv/blocks.py: Marked`): how much the committed rows start .. stop - 1 matter,
            [stop - start]. Asked as a block is sealed: after `stayed`, all of the prompt's blocks at once
        places(layer: int, shape: KVShape) -> int  -- how many KV heads' positions must be told of rows that stay, 1 if
            `keep` gives [K] there, 0 if nothing goes; otherwise all: room for them is booked with the rows
        delta: Delta  -- as of a skip method: low-rank weights that the rows of its phases, and no others, run with. Of
            the methods of a phase one may bring some
        whole: bool  -- True: what it does with a prompt needs all of its rows at once. Prompts then come in one piece,
            however few rows a scheduler gives them; decode methods that compute them in blocks are refused
    """

    observes: int  # how many of the last prompt rows it must see the queries of (they are never taken from a prefix)

    def plan(self, span: Span) -> AttentionPlan:
        """What the rows of a span still see, and the attention weights that are wanted of them (`step/plan.py`).

        A window says what rows see before others are really dropped, so that a chunk equals single steps; a record
        takes weights. It depends on the span and its request alone, and is one object for as long as it is the same.
        """
        ...

    def due(self, request: Request) -> bool:
        """Whether `keep` has work to do for this request now (called after each commit)."""
        ...

    def keep(self, request: Request, layer: int) -> Tensor | Sequence[Tensor] | None:
        """Slots of the committed rows to keep, increasing: [K], [H, K] or one per head; None = all."""
        ...


def retain(scores: Tensor, keep: int, recent: int = 0) -> Tensor:
    """Slots of the `keep` best scores [H, N] per head, and the `recent` slots after all of them.

    -> increasing [H, min(keep, N) + recent]. Of equal scores the earlier slot stays, on every device.
    """
    heads, n = scores.shape
    best = scores.sort(stable=True, dim=-1, descending=True).indices[:, :keep].sort(-1).values
    last = torch.arange(n, n + recent, device=scores.device).expand(heads, -1)
    return torch.cat((best, last), -1)
