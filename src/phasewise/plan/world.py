"""Discrete events: a virtual clock that jumps from one to the next."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any

from phasewise.errors import UserError


class World:
    """Events in order of their times; those of one time in the order in which they were said."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[..., object], tuple[Any, ...]]] = []
        self._numbers = itertools.count()

    def at(self, when: float, call: Callable[..., object], *given: Any) -> None:
        assert when >= self.now, "nothing happens in the past"
        heappush(self._events, (when, next(self._numbers), call, given))

    def run(self, until: float = math.inf) -> None:
        """Let everything happen, or what happens up to some time."""
        events = self._events
        while events and events[0][0] <= until:
            self.now, _, call, given = heappop(events)
            call(*given)


@dataclass(frozen=True)
class Link:
    """What carries KV from worker to worker: bytes per second, and seconds before the first of them is there."""

    bandwidth: float = math.inf
    latency: float = 0.0

    def __post_init__(self) -> None:
        if not self.bandwidth > 0:
            raise UserError(f"link={self.bandwidth:g} B/s carries nothing: give a bandwidth above 0")
        if not 0 <= self.latency < math.inf:
            raise UserError(f"link latency={self.latency:g} s must be a number of seconds of at least 0")

    def seconds(self, n_bytes: float) -> float:
        """That it is taken by so many bytes."""
        return n_bytes / self.bandwidth


LOCAL = Link()  # between workers that share a memory
