"""Records how often guesses were right: in all requests, and in one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from phasewise.speculation.planner import DEEPEST, LAST_RANK, STATED
from phasewise.verbs.draft import Draft

STATED_WEIGHT = 4.0  # a stated likelihood counts as so many trials
OWN_WEIGHT = 5.0  # a request's own record of a kind counts half once it has so many trials
ALL_WEIGHT = 3.0  # likewise that of all kinds
OWN_FADE, ALL_FADE = 0.97, 0.97  # what a trial leaves of the trials of its kind before it
DOUBT = 0.85  # what guesses for a request are taken to be worth before any of its own was right
LATELY = 0.9  # what a trial leaves of the trials of all kinds before it
FIRST = 12.0  # trials of a kind in which a request counts among all


class Chances:
    """Acceptance rates of a kind of guess where its parent was right, in all requests; the past fades.

    A request counts by its first trials of a kind alone: one that says the same over and over has hundreds of them, and
    they say little about the next one.
    """

    def __init__(self) -> None:
        self._counts: dict[int, list[float]] = {}  # kind -> [tried, right]
        self._right = self._hoped = 0.0  # guesses of all kinds that were right of late, and how many should have been

    @property
    def worse(self) -> float:
        """The share of recent expectations that came true: texts of another sort show in all kinds at once."""
        return min(1.0, (self._right + ALL_WEIGHT) / (self._hoped + ALL_WEIGHT))

    def of(self, kind: int) -> float:
        """Before any was tried: what was stated, or half. A kind never tried is as likely as that of the parents. What
        was stated holds of texts of all kinds: those of late may be worse, and better only by a request's own record.
        """
        if kind >= STATED:
            stated, counts = (kind - STATED) / 1000, self._counts.get(kind)
            return stated if counts is None else min(stated, counts[1] / counts[0])
        while (found := self._counts.get(kind)) is None and kind // (LAST_RANK + 1) % (DEEPEST + 1):
            kind -= LAST_RANK + 1
        return 0.5 if found is None else (found[1] + 0.5) / (found[0] + 1)

    def note(self, kind: int, right: bool) -> None:
        self._right = LATELY * self._right + right
        self._hoped = LATELY * self._hoped + self.of(kind)
        counts = self._counts.get(kind)
        if counts is None:
            stated = STATED_WEIGHT if kind >= STATED else 0.0
            counts = self._counts[kind] = [stated, stated * (kind - STATED) / 1000]
        counts[0] = ALL_FADE * counts[0] + 1
        counts[1] = ALL_FADE * counts[1] + right


@dataclass(slots=True)
class PendingGuess:
    """A guess whose end the request's text has not reached yet: right down to `node`, whose token is before `at`."""

    draft: Draft
    kinds: Sequence[int]
    at: int
    node: int = -1


@dataclass(slots=True)
class GuessRecord:
    """The outcomes of one request's guesses. Whether they ran does not matter: the text says which were right."""

    watched: PendingGuess | None = None
    counts: dict[int, list[float]] = field(default_factory=dict)  # kind -> [tried, right]
    right: float = 0.0  # guesses of all kinds that were right, of late ...
    hoped: float = 0.0  # ... and how many should have been, by what is known of other requests

    def settle(self, tokens: Sequence[int], chances: Chances) -> None:
        """Hold the guess that is watched against the text so far."""
        watched = self.watched
        if watched is None:
            return
        for at in range(watched.at, len(tokens)):
            after = None
            for child in watched.draft.children(watched.node):
                right, kind = watched.draft.tokens[child] == tokens[at], watched.kinds[child]
                after = child if right else after
                self.right = OWN_FADE * self.right + right
                self.hoped = OWN_FADE * self.hoped + chances.of(kind)
                counts = self.counts.setdefault(kind, [0.0, 0.0])
                if counts[0] < FIRST:
                    chances.note(kind, right)
                counts[:] = OWN_FADE * counts[0] + 1, OWN_FADE * counts[1] + right
            if after is None:
                self.watched = None
                return
            watched.node, watched.at = after, at + 1

    def watch(self, draft: Draft, kinds: Sequence[int], known: int) -> None:
        """Unless another guess is still watched."""
        if self.watched is None:
            self.watched = PendingGuess(draft, kinds, known)

    def chance(self, kind: int, chances: Chances) -> float:
        """The chance that a guess of this kind is right if its parent is. Where a request's guesses are wrong more
        often than those of others, so it is with kinds of which it had few."""
        worse = min(1.0, (self.right + ALL_WEIGHT * DOUBT * chances.worse) / (self.hoped + ALL_WEIGHT))
        common, own = worse * chances.of(kind), self.counts.get(kind)
        return common if own is None else (own[1] + OWN_WEIGHT * common) / (own[0] + OWN_WEIGHT)
