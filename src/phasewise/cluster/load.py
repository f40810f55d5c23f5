"""How much the workers have to do, and which of them have room: what the router works out before a policy chooses.

`parts` are those of an engine like the workers': its limits, and what rows of its store cost.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from phasewise.cluster.desk import Desk
from phasewise.cluster.trip import Trip
from phasewise.engine import Parts
from phasewise.kv.layer_kv import ROUND
from phasewise.request import Request


def weigh(desks: Sequence[Desk], trips: Iterable[Trip], but: Request | None = None) -> None:
    """Bring the desks' loads up to date: what they prefill, and what they decode or will decode, as far as that is
    decided; all requests `but` one."""
    for desk in desks:
        desk.prefilling = desk.decoding = 0
    for trip in trips:
        if trip.caller is but:
            continue
        if trip.computing:
            trip.desk.prefilling += trip.caller.known
        goes_on = trip.desk if not trip.departs else trip.move.target if trip.move is not None else None
        if goes_on is not None:
            goes_on.decoding += trip.caller.known


def may_keep(desk: Desk, parts: Parts, waiting: Sequence[int], room: int) -> bool:
    """Whether a worker seems to have `room` bytes besides what those that run there, and those of so many tokens that
    wait there, may take. It may say no."""
    if len(desk.spec.phases) == 1 or not desk.state:
        return False
    running = desk.state["running"] + desk.coming
    taken = sum(map(parts.store.cost, waiting)) + running * ROUND * parts.store.row_bytes
    return bool(running + len(waiting) < parts.max_running and desk.free >= room + taken)


def has_room(desk: Desk, parts: Parts, n_bytes: int) -> bool:
    """Whether a worker has so many bytes for a request. Those that wait for memory there go first, and those that run
    may grow a bit. What is lent needs no room: a lone request that cannot grow even wants company to take it from."""
    if len(desk.spec.phases) == 1 or not desk.state:
        return False
    running = desk.state["running"] + desk.coming
    if not n_bytes:
        return bool(running < parts.max_running or (running == 1 and desk.state["wish"]))
    if desk.state["waiting"] or desk.state["arrivals"]:
        return False
    growth = running * ROUND * parts.store.row_bytes
    return bool(running < parts.max_running and desk.free >= n_bytes + growth)
