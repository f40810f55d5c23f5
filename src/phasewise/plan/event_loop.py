"""Discrete events: a virtual clock that jumps from one to the next."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from enum import IntEnum
from heapq import heappop, heappush
from typing import Any


class Turn(IntEnum):
    """The order of what happens at one moment: steps end and KV arrives, the router hears of it, requests come, and
    then steps begin. So whatever is known at a moment is known to every step that begins then."""

    END = 0
    ROUTE = 1
    ARRIVE = 2
    BEGIN = 3


class EventLoop:
    """Runs calls in the order of their times, those of one time by their turns, and then as they were scheduled."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, int, Callable[..., object], tuple[Any, ...]]] = []
        self._numbers = itertools.count()

    def at(self, when: float, turn: Turn, call: Callable[..., object], *given: Any) -> None:
        """Schedule a call; `when` must not lie in the past."""
        assert when >= self.now, f"{when} lies before {self.now}"
        heappush(self._events, (when, turn, next(self._numbers), call, given))

    def soon(self, turn: Turn, call: Callable[..., object], *given: Any) -> None:
        """Schedule a call for this moment."""
        heappush(self._events, (self.now, turn, next(self._numbers), call, given))

    @property
    def done(self) -> bool:
        """Nothing else is scheduled for this moment."""
        return not self._events or self._events[0][0] > self.now

    def run(self) -> None:
        """Let everything happen."""
        events = self._events
        while events:
            self.now, _, _, call, given = heappop(events)
            call(*given)
