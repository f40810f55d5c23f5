"""Looking into placements: the engines that they are made of, and taking requests' memory away."""

from __future__ import annotations

from collections.abc import Callable

from phasewise.cluster.inline import InlineConnection
from phasewise.cluster.router import Router
from phasewise.engine.engine import Engine
from phasewise.request.request import Request
from phasewise.verbs.place import Placed


def engines(placed: object) -> list[Engine]:
    """The engines a placement is made of."""
    if isinstance(placed, Engine):
        return [placed]
    assert isinstance(placed, Router)
    connections = [handle.connection for handle in placed.handles]
    return [each.worker.engine for each in connections if isinstance(each, InlineConnection)]


def preempt(placed: Placed, whom: Callable[[int, Request], bool]) -> int:
    """Preempt running requests that `whom` answers True for, given their index over all engines. Returns how many."""
    running = [(engine, request) for engine in engines(placed) for request in engine.running]
    found = [(engine, request) for i, (engine, request) in enumerate(running) if whom(i, request)]
    for engine, request in found:
        engine.room.preempt(request)
    return len(found)
