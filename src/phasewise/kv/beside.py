"""Derived data, such as the bounds of pages: methods work it out from a layer's rows and keep it beside them. Its bytes
are booked in the ledger.

Bytes are booked ahead, when room for rows is made, so that deriving takes none: what was admitted goes on. A method
says how much it may want (`verbs/attend.py`); what it keeps beyond that is booked where there is room, else not kept.
What lies in drawers instead is booked by `kv/drawers.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Protocol

from phasewise.kv.buffer import Ledger

Wants = Callable[[int], int]
"""Bytes wanted at most beside rows whose positions lie below so many."""


class Derived(Protocol):
    """Data that a method has worked out from committed rows, such as the bounds of pages."""

    @property
    def bytes(self) -> int:
        """Bytes of its tensors."""
        ...

    def fork(self) -> Derived: ...


class Beside:
    """Derived data of one layer by key, and the bytes booked for it.

    Forks share one, which counts once, until either side makes room to write or its rows change; then each has one of
    its own, and what they still share counts for each.
    """

    __slots__ = ("booked", "kept", "ledger", "refs")

    def __init__(self, ledger: Ledger, booked: int = 0) -> None:
        self.ledger, self.booked, self.refs = ledger, booked, 1
        self.kept: dict[Hashable, Derived] = {}
        ledger.add(booked)

    @property
    def bytes(self) -> int:
        """Bytes of all that is kept now; they are never more than are booked."""
        return sum(value.bytes for value in self.kept.values())

    def get(self, key: Hashable) -> Derived | None:
        return self.kept.get(key)

    def keep(self, key: Hashable, value: Derived) -> None:
        """Keep `value` in place of what was kept by that name. Where the budget has no room for it, all stays as it
        was: it will have to be worked out again."""
        assert self.refs == 1, "what forks share is not written"
        before = self.kept.get(key)
        lacking = self.bytes - (before.bytes if before is not None else 0) + value.bytes - self.booked
        if lacking > 0:
            if not self.ledger.room(lacking):
                return
            self._book(self.booked + lacking)
        self.kept[key] = value

    def growth(self, wanted: int) -> int:
        """Bytes that `own(wanted)` would book."""
        return max(wanted, self.bytes) if self.refs > 1 else max(0, wanted - self.booked)

    def own(self, wanted: int) -> Beside:
        """The same, shared with nobody, with at least `wanted` bytes booked."""
        if self.refs == 1:
            self._book(wanted)
            return self
        mine = Beside(self.ledger, self.growth(wanted))
        mine.kept = {key: value.fork() for key, value in self.kept.items()}
        self.refs -= 1
        return mine

    def share(self) -> Beside:
        self.refs += 1
        return self

    def emptied(self) -> Beside:
        """With nothing kept: the rows have changed. What is booked stays booked, but not what others share."""
        if self.refs > 1:
            return self.left()
        self.kept = {}
        return self

    def left(self) -> Beside:
        """One holder fewer; the last one gives the bytes back. -> an empty one in its place."""
        self.refs -= 1
        if self.refs == 0:
            self.ledger.add(-self.booked)
            self.booked, self.kept = 0, {}
        return Beside(self.ledger)

    def _book(self, wanted: int) -> None:
        if wanted > self.booked:
            self.ledger.add(wanted - self.booked)
            self.booked = wanted
