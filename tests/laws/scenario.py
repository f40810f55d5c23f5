"""One trace in which everything happens to a method's requests at once, each of them held against itself alone.

Requests of the method, greedy and sampled, share their steps with requests of other recipes. Prompts are cut, one
worker computes them and another one goes on, requests are preempted, forked, cancelled and find cached prefixes. None
of that may change a token. Only where a token does change is every event tried by itself, to say which law is broken.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from random import Random
from typing import Any

from phasewise.builder import Builder
from phasewise.engine.limits import Limits
from phasewise.model.model import Model
from phasewise.options import parse, parse_recipes
from phasewise.recipes import ENGINE_WIDE
from phasewise.request.params import Params
from phasewise.request.request import Request
from phasewise.verbs.place import Placed
from tests import oracle, tiny
from tests.laws.compare import Reference
from tests.laws.engines import preempt

EVENTS = {
    "mates": "requests in the same steps, some of them of other recipes",
    "slices": "a scheduler that cuts prompts",
    "preemption": "KV lost at some moment and computed again",
    "fork": "a sample that goes on from another one's prompt",
    "prefix": "rows of a prompt from the prefix cache",
    "cancellation": "requests that are dropped",
    "hand-off": "prompts computed by one worker, decoded by another",
}
MATES = {
    "fast": {"draft": "prompt_lookup:k=3", "verify": "match"},
    "window": {"evict": "streaming:sinks=2,window=10"},
}
N = 8  # tokens of a request
PROMPTS = tiny.prompts(50, 20, 33, 26, 41)
WHOLE, PLACE = "prefill_first", "disaggregated:local=24"  # prompts of up to 24 tokens are decoded where they are
GREEDY = Params(N, ignore_eos=True)
SAMPLED = Params(N, temperature=0.8, top_p=0.95, seed=11, ignore_eos=True)
Verbs = Mapping[str, str]


@dataclass
class Trace:
    """Requests of a method and of its mates by name, and what the engines counted."""

    requests: dict[str, Request]
    counters: Any
    prefix_hits: int  # of the method's own requests

    def broken(self, verbs: Verbs) -> list[str]:
        """The requests that do not have the tokens they have alone."""
        found = []
        for name, request in self.requests.items():
            want = alone(MATES.get(request.recipe, verbs), request)
            if request.left is None or request.left.how != "finished":
                found.append(f"{name} {request.left}")
            elif request.out != want:
                found.append(f"{name} says {request.out} instead of {want}")
        return found


_ALONE: dict[tuple[Model, str], list[int]] = {}


def alone(verbs: Verbs, request: Request) -> list[int]:
    """What a request gets in an engine of its own, in one piece, with nothing cached. Kept: it is asked for again."""
    own = {verb: text for verb, text in verbs.items() if verb not in ENGINE_WIDE}
    key = tiny.model(), repr((sorted(own.items()), request.prompt, request.params))
    if key not in _ALONE:
        placed = tiny.engine({"schedule": WHOLE} | own, prefix_cache=False)
        (_ALONE[key],) = tiny.outs(tiny.run(placed, [request.prompt], request.params))
    return _ALONE[key]


def forget() -> None:
    """Forget what methods gave alone: their names are given to others."""
    _ALONE.clear()


@cache
def recomputed() -> Reference:
    """Tokens of the greedy request by full recomputation."""
    tokens, gaps = oracle.greedy(tiny.checkpoint(), PROMPTS[0], N)
    return Reference([PROMPTS[0]], [tokens], [gaps])


def build(verbs: Verbs, schedule: str, events: Collection[str]) -> Placed:
    """An engine, or two workers, with the method as the recipe "mine" and the recipes of its mates."""
    wide = {"schedule": schedule if "slices" in events else WHOLE}
    wide |= {"place": PLACE} if "hand-off" in events else {}
    wide |= {verb: text for verb, text in verbs.items() if verb in ENGINE_WIDE}
    own = {verb: text for verb, text in verbs.items() if verb not in ENGINE_WIDE} or {"decode": "autoregressive"}
    recipes = parse_recipes(wide, {"mine": own, **MATES})
    limits = Limits(kv_bytes=64 << 20, prefix_cache="prefix" in events)
    return Builder(tiny.model(), parse(wide), limits, load=tiny.load, recipes=recipes).build()


def run(verbs: Verbs, schedule: str, events: Collection[str] = tuple(EVENTS)) -> Trace:
    """The trace with these events. Without mates, every request has an engine of its own."""
    greedy, sampled = mine(PROMPTS[0], GREEDY), mine(PROMPTS[1], SAMPLED)
    family = {"forked": sampled.sibling(1)} if "fork" in events else {}
    if "mates" in events:
        return together(verbs, schedule, events, {"greedy": greedy, "sampled": sampled, **family})
    first = together(verbs, schedule, events, {"greedy": greedy})
    second = together(verbs, schedule, events, {"sampled": sampled, **family})
    return Trace(first.requests | second.requests, first.counters + second.counters, first.prefix_hits)


def mine(prompt: Sequence[int], params: Params) -> Request:
    return Request(prompt, params, recipe="mine")


def together(verbs: Verbs, schedule: str, events: Collection[str], requests: dict[str, Request]) -> Trace:
    """These requests, what the events bring beside them, and what happens to all of them."""
    placed, random = build(verbs, schedule, events), Random(zlib.crc32(repr(sorted(verbs.items())).encode()))
    late = {}
    if "prefix" in events and "greedy" in requests:
        late["again"] = mine([*PROMPTS[0], *PROMPTS[1][:9]], SAMPLED)
    if "mates" in events:
        requests |= {"fast": Request(PROMPTS[2], GREEDY, recipe="fast")}
        late |= {"window": Request(PROMPTS[0], SAMPLED, recipe="window")}  # the same rows would be of no use to it
    dropped = {random.randint(1, 9): mine(PROMPTS[4], params) for params in (GREEDY, SAMPLED)}
    dropped = dropped if "cancellation" in events else {}
    for request in (*dropped.values(), *requests.values()):
        placed.add(request)
    lost = {random.randint(2, 5), random.randint(7, 12)} if "preemption" in events else set()
    step, decoding = 0, bool(lost)
    while not placed.idle or late:
        if late and (placed.idle or ("mates" in events and requests["greedy"].n_out)):
            for request in late.values():
                placed.add(request)
            requests, late = requests | late, {}
        if step in dropped:
            placed.cancel(dropped[step])
        if step in lost:
            preempt(placed, lambda i, request: bool(i % 2))
        if decoding and any(request.n_out > 2 for request in requests.values()):
            decoding = not preempt(placed, lambda i, request: request.n_out > 0)
        placed.step()
        step += 1
    hits = placed.by_recipe["mine"]["prefix_hits"]
    tiny.finish(placed, [*requests.values()])
    return Trace(requests, placed.counters, hits)


def check(verbs: Verbs, schedule: str) -> Trace:
    """Everything at once; where a token differs, each event by itself. Raises AssertionError naming broken laws."""
    trace = run(verbs, schedule)
    counters = trace.counters
    broken = trace.broken(verbs)
    if broken:
        single = [event for event in EVENTS if run(verbs, schedule, [event]).broken(verbs)]
        laws = "; ".join(f"{event} ({EVENTS[event]})" for event in single)
        if not single:
            without = {event: run(verbs, schedule, [other for other in EVENTS if other != event]) for event in EVENTS}
            needed = [event for event, trace in without.items() if not trace.broken(verbs)]
            laws = f"no event by itself, but not without {' and '.join(needed) or 'most of them'}"
        raise AssertionError(f"tokens are not a request's own. Broken by {laws}.\n" + "\n".join(broken))
    assert counters.preemptions and (counters.handoffs or "place" in verbs), "the trace had not all of its events"
    return trace
