"""Whole engines side by side: a request goes where its prefix is, unless too much waits there; counted in rows."""

from __future__ import annotations

import pytest

from phasewise.bench.prompts import random_prompts
from phasewise.bench.workloads import lengths, workload
from phasewise.cluster.prefix_routing import PrefixRouting
from phasewise.errors import UserError
from phasewise.options import parse
from phasewise.plan.arrivals import Load
from phasewise.plan.simulate import run
from phasewise.request.params import SLO, Params
from phasewise.request.request import Request
from tests import tiny
from tests.place.test_pools import Bench
from tests.plan.scenarios import Linear, scenario

CONVERSATIONS = "turns:users=6,turns=3,system=64,prompt=32,new=32"


def prompt(n: int) -> list[int]:
    return [7] * n


# ---- the rule
def test_the_least_to_compute_is_chosen() -> None:
    rule = PrefixRouting(3, weight=0.5)
    warm, idle, busy = Bench("replica", 30, 0, hits=90), Bench("replica"), Bench("replica", 0, 70, hits=100)
    assert rule.cost(prompt(100), warm) == 40 and rule.cost(prompt(100), idle) == 100
    assert rule.start(prompt(100), [idle, busy, warm]) is busy  # 0 + 0.5 x 70
    warm.prefilling = 24
    assert rule.start(prompt(100), [idle, busy, warm]) is warm
    warm.prefilling, busy.decoding = 200, 300
    assert rule.start(prompt(100), [idle, busy, warm]) is idle, "a cache does not make up for a long queue"


def test_others_do_not_look_at_the_caches_and_equals_take_turns() -> None:
    views = [Bench("replica", hits=50), Bench("replica"), Bench("replica", 10)]
    for route in ("load", "turns"):
        rule = PrefixRouting(3, route)  # type: ignore[arg-type]
        found = [views.index(rule.start(prompt(60), views)) for _ in range(6)]
        assert found == ([0, 1, 0, 0, 1, 0] if route == "load" else [0, 1, 2, 0, 1, 2])
    rule = PrefixRouting(2)
    same = [Bench("replica"), Bench("replica")]
    assert [same.index(rule.start(prompt(9), same)) for _ in range(4)] == [0, 1, 0, 1]


@pytest.mark.parametrize("knobs", ["workers=0", "route=random", "weight=-1"])
def test_what_makes_no_sense_is_refused(knobs: str) -> None:
    with pytest.raises(UserError, match=f"replicated: .*{knobs.partition('=')[0]}="):
        parse({"place": f"replicated:{knobs}"})


# ---- rows that are computed
def served(route: str) -> tuple[int, int, list[list[int]]]:
    """Prompt rows computed and found in caches, and the answers, of conversations that come one turn after another."""
    placed = tiny.engine({"place": f"replicated:workers=3,route={route}"}, cluster="inline")
    shots = workload(lengths(CONVERSATIONS), 18, random_prompts(60, 3))
    outs: list[list[int]] = []
    try:
        for turn in range(3):
            wave = [Request(shot.prompt, Params(max_tokens=2)) for shot in shots[6 * turn : 6 * turn + 6]]
            for request in wave:
                placed.add(request)
            while any(request.left is None for request in wave):
                placed.step()
            outs += tiny.outs(wave)
        return placed.counters.prompt_rows, placed.counters.prefix_hits, outs
    finally:
        placed.close()


def test_prefix_routing_computes_fewer_rows() -> None:
    """What a conversation has said before is found where it was said; elsewhere only the system prompt is."""
    rows, hits, outs = served("prefix")
    blind, found, same = served("turns")
    assert outs == same and rows + hits == blind + found == 6 * (96 + 160 + 224)
    assert hits > 1.3 * found and rows < 0.85 * blind, (rows, hits, blind, found)


def simulated(route: str) -> tuple[int, float]:
    """Prompt tokens found in caches, and the median time to the first token."""
    load = Load(lengths("turns:users=16,turns=6,system=256,prompt=128,new=64"), 96, rate=4.0)
    assert load.shares
    outcome = run(
        scenario(Linear(0.005, prompt=0.0005), f"replicated:workers=4,route={route}", prefix_cache=True),
        load.jobs(SLO()),
    )
    numbers = outcome.numbers(SLO())
    assert numbers["failed"] == 0 and numbers["workers"] == 4
    return numbers["prefix_hits"], numbers["ttft_p50_s"]


def test_the_simulator_runs_the_same_rule() -> None:
    (hits, first), (blind, later) = simulated("prefix"), simulated("turns")
    assert hits > 1.3 * blind and first < later


def test_a_planner_tries_replicas() -> None:
    from phasewise.methods.place.replicated import Replicated

    assert Replicated.sizes(4) == ["workers=2", "workers=3", "workers=4"]
    assert Replicated.sizes(1) == []
