"""The invariants notice what they are there to notice."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from phasewise.engine.engine import Engine
from phasewise.engine.invariants import check
from phasewise.request.request import Departure, Request
from tests import tiny


def busy() -> Engine:
    """Two running, one of them half-way through the layers, and one waiting."""
    engine = tiny.engine({"schedule": "layered:rows_per_group=8"}, max_running=2, prefix_cache=False)
    requests = [Request(p, tiny.greedy(9)) for p in tiny.prompts(5, 30, 7)]
    engine.add(requests[0])
    engine.step()
    for request in requests[1:]:
        engine.add(request)
    engine.step()
    assert [r.depth for r in engine.running] == [0, 1] and len(engine.waiting) == 1
    check(engine)
    return engine


def lose_a_slab(engine: Engine) -> None:
    engine.running[0].kv.layers[0].slabs.clear()


def overdraw(engine: Engine) -> None:
    engine.store.ledger.limit = engine.store.ledger.used - 1


BREAKS: list[tuple[str, Callable[[Engine], object]]] = [
    ("in two places", lambda e: e.waiting.append(e.running[0])),
    ("in no queue", lambda e: e.running.pop()),
    ("not registered", lambda e: e.waiting.append(Request([5]))),
    ("out of order", lambda e: e.running.reverse()),
    ("has left", lambda e: setattr(e.running[0], "left", Departure("finished", "stop"))),
    ("more than is known", lambda e: setattr(e.running[0], "computed", 99)),
    ("half under way", lambda e: setattr(e.running[1], "depth", 0)),
    ("waits but holds memory", lambda e: e.waiting[0].state.update(x=1)),
    ("waits but holds memory", lambda e: setattr(e.waiting[0], "computed", 1)),
    ("runs without KV", lambda e: setattr(e.running[0], "kv", None)),
    ("uncommitted rows", lambda e: setattr(e.running[0].kv.layers[2], "fresh", 1)),
    ("belong to nobody", lose_a_slab),
    ("limit", overdraw),
    ("held", lambda e: setattr(e.room, "promised", -(1 << 40))),
]


@pytest.mark.parametrize(("words", "harm"), BREAKS, ids=lambda value: value if isinstance(value, str) else "")
def test_a_broken_rule_is_named(words: str, harm: Callable[[Engine], object]) -> None:
    engine = busy()
    harm(engine)
    with pytest.raises(AssertionError, match=words):
        check(engine)
