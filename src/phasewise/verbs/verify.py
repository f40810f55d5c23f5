"""verify: which guesses stay?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from phasewise.verbs.sample import Dist

if TYPE_CHECKING:
    from phasewise.verbs.draft import Draft


class Random(Protocol):
    def __call__(self, depth: int, purpose: int, index: int = 0) -> float:
        """A number in [0, 1) for the token `depth` places after the pending one."""
        ...


@dataclass(frozen=True, slots=True)
class Shown:
    """The outputs of the pass for a draft's rows, of which a verifier `wants` some; the rest is None."""

    logits: Tensor | None = None  # float32 [rows, V], as the model says them, but -inf where a token is excluded
    hidden: Tensor | None = None  # rows of the last layer [rows, d]

    def part(self, start: int, end: int) -> Shown:
        """Rows start .. end-1, sharing memory."""
        logits = None if self.logits is None else self.logits[start:end]
        return Shown(logits, None if self.hidden is None else self.hidden[start:end])


class Verifier(Protocol):
    """verify: which guesses stay? Pure: no model, no cache.

    Optional:
        wants: frozenset  -- "logits", "hidden": it is called with a `Shown` that has them, as a fourth argument;
            "thoughts": drafts have theirs, where the drafter can tell
        matches: str  -- the drafts under which its tokens are plain decoding's, random number by random number,
            whatever was guessed: "all", those whose guesses were chosen ("point"), or "none", as without it
    """

    def __call__(self, draft: Draft, p: Dist, rng: Random) -> tuple[list[int], int]:
        """`p` row 0 is the target's distribution after the pending token, row i + 1 after node i.

        -> (accepted nodes, root first, each the parent of the next; the token that follows them).
        """
        ...
