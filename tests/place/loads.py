"""Random requests to a placement whose workers die at given steps, and what must have become of every one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from phasewise.cluster.router import Router
from tests.engine.engines import same
from tests.engine.test_engine import Arrival, _family, _full
from tests.place.links import Clock, check_router


def survive(
    placed: Router, load: Sequence[Arrival], deaths: Mapping[int, int], clock: Clock,
    check: Callable[[Router], None] = check_router,
) -> None:  # fmt: skip
    """Everybody leaves with the tokens of an undisturbed run; `check` holds after every step, a second each.

    `deaths`: {step: which worker is killed before it}.
    """
    families = [_family(arrival) for arrival in load]
    for now in range(3000):
        clock.tick()
        for arrival, family in zip(load, families):
            if arrival.step == now:
                for request in family:
                    placed.add(request)
            if arrival.cancelled is not None and arrival.step + arrival.cancelled == now:
                placed.cancel(family[0])
        if now in deaths:
            placed.handles[deaths[now] % len(placed.handles)].connection.kill()
        placed.step()
        check(placed)
        if now > 60 and all(r.left for family in families for r in family):
            break
    for arrival, family in zip(load, families):
        for request in family:
            assert request.left is not None, "lost"
            assert request.left.how in ("finished", "cancelled"), request.left
            assert same(request, _full(arrival, request))
