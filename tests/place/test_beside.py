"""What methods keep beside rows counts in every worker's budget, wherever requests go from one to another."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from phasewise.cluster.router import Router
from phasewise.request.request import Request
from tests import tiny
from tests.engine.engines import sampled
from tests.place import pooled
from tests.place.links import disaggregated, engines, finish
from tests.place.pooled import semi_pd
from tests.seeds import draw

QUEST = {"attend": "quest:page=4,budget=12,dense_layers=1", "schedule": "sarathi:budget=16"}
PROMPTS = tiny.prompts(90, 64, 100, 33, 71)
NEW = 40

PLACES: dict[str, tuple[Callable[..., Router], Callable[..., None], dict[str, object], int]] = {
    "pull": (disaggregated, finish, {}, 2),
    "push": (disaggregated, finish, {"knobs": ":transfer=push"}, 2),
    "semi_pd": (semi_pd, pooled.finish, {}, 1),
}
"""What makes a placement, what runs it, and over how many engines its budget is divided."""


@pytest.mark.parametrize("name", [draw(__name__).choice([*PLACES])])
def test_workers_that_are_short_of_memory(name: str) -> None:
    place, end, options, shares = PLACES[name]
    alone = tiny.engine(QUEST, prefix_cache=False)
    need = max(alone.runtime(Request(p)).need(len(p) + NEW + 64) for p in PROMPTS)
    assert need > max(alone.store.row_bytes * (len(p) + NEW + 64) for p in PROMPTS)
    placed = place(QUEST, kv_bytes=2 * need * shares, prefix_cache=False, **options)
    requests = [Request(p, sampled(NEW, seed=i)) for i, p in enumerate(PROMPTS)]
    for request in requests:
        placed.add(request)
    most = [0]

    def each() -> None:
        kvs = [r.kv for engine in engines(placed) for r in engine.running if r.kv is not None]
        most[0] = max(most[0], sum(kv.derived_bytes for kv in kvs))

    end(placed, requests, each)
    expected = [tiny.plain([r.prompt], r.params, QUEST)[0] for r in requests]
    assert tiny.outs(requests) == expected and most[0] > 0
