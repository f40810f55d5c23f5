"""verify: which guesses stay?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from phasewise.verbs.sample import Dist

if TYPE_CHECKING:
    from phasewise.verbs.draft import Draft


class Random(Protocol):
    def __call__(self, depth: int, purpose: int, index: int = 0) -> float:
        """A number in [0, 1) for the token `depth` places after the pending one."""
        ...


class Verifier(Protocol):
    """verify: which guesses stay? Pure: no model, no cache.

    Optional:
        matches: str  -- the drafts under which its tokens are plain decoding's, random number by random number,
            whatever was guessed: "all", those whose guesses were chosen ("point"), or "none", as without it
    """

    def __call__(self, draft: Draft, p: Dist, rng: Random) -> tuple[list[int], int]:
        """`p` row 0 is the target's distribution after the pending token, row i + 1 after node i.

        -> (accepted nodes, root first, each the parent of the next; the token that follows them).
        """
        ...
