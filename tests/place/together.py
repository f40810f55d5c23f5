"""What several placements are put through alike: siblings of one prompt, and a request that breaks a worker."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

from phasewise.cluster.router import Router
from phasewise.request.request import Request
from tests import tiny
from tests.engine.engines import alone, break_decode, method_options, sampled
from tests.place.links import engines

Finish = Callable[[Router, Sequence[Request]], None]


def methods_of(draw: Random, n: int) -> list[dict[str, str]]:
    """The options of `n` methods that shape KV, select from it or decode otherwise."""
    found = draw.sample(method_options("evict", "store", "attend", "skip", "draft", "decode"), n)
    return [options | ({"verify": "match"} if "draft" in options else {}) for options in found]


def siblings(placed: Router, prompt: Sequence[int], finish: Finish) -> list[Request]:
    """Four requests of one prompt, the first the parent of the others: each gets the tokens it gets alone."""
    parent = Request(prompt, sampled(7))
    family = [parent, *(parent.sibling(i) for i in (1, 2, 3))]
    for request in family:
        placed.add(request)
    finish(placed, family)
    assert tiny.outs(family) == [alone(r) for r in family]
    return family


def one_fails(placed: Router, side: str, prompts: Sequence[Sequence[int]], finish: Finish) -> Request:
    """A worker's decode method raises for one of these requests, which fails, and no other. -> that one"""
    (engine,) = engines(placed, side)
    break_decode(engine, ["accept"], {"bad"})
    requests = [Request(p, tiny.greedy(5), id="bad" if i == 1 else f"good-{i}") for i, p in enumerate(prompts)]
    for request in requests:
        placed.add(request)
    finish(placed, requests)
    bad = requests.pop(1)
    assert bad.left is not None and (bad.left.how, bad.left.reason) == ("failed", "Boom: accept")
    assert tiny.outs(requests) == [alone(r) for r in requests]
    return bad
