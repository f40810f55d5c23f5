"""Admission by the router: the workers that have room for a request, before a policy chooses among them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from phasewise.cluster.handle import WorkerHandle
from phasewise.cluster.in_flight import InFlight
from phasewise.kv.buffer import ROUND


class Rooms(Protocol):
    """The limits of an engine like the workers': `Parts` is one. `row_bytes`: of a token, where it takes most."""

    @property
    def max_running(self) -> int: ...
    @property
    def row_bytes(self) -> int: ...
    @property
    def recipes(self) -> Mapping[str, Any]:
        """Its recipes, each with a `store` that knows the bytes of so many tokens."""
        ...


def may_keep(handle: WorkerHandle, parts: Rooms, room: int, requests: Mapping[str, InFlight]) -> bool:
    """Returns whether a worker seems to have `room` bytes besides what its running requests, and those of `requests`
    that wait there, may take. The worker may still refuse."""
    state = handle.state
    if not handle.spec.decodes or not state:
        return False
    running = state["running"] + handle.coming
    taken = running * ROUND * parts.row_bytes
    if waiting := [requests[name].caller for name in state["waiting"] if name in requests]:
        taken += sum(parts.recipes[request.recipe].store.cost(request.known) for request in waiting)
    return bool(running + len(waiting) < parts.max_running and handle.free >= room + taken)


def has_room(handle: WorkerHandle, parts: Rooms, n_bytes: int) -> bool:
    """Returns whether a worker has so many bytes for a request. Those that wait for memory there go first, and those
    that run may grow a bit. What is lent needs no room: a lone request that cannot grow even takes it from company."""
    if not handle.spec.decodes or not handle.state:
        return False
    running = handle.state["running"] + handle.coming
    if not n_bytes:
        return bool(running < parts.max_running or (running == 1 and handle.state["wish"]))
    if handle.state["waiting"] or handle.state["arrivals"]:
        return False
    growth = running * ROUND * parts.row_bytes
    return bool(running < parts.max_running and handle.free >= n_bytes + growth)
