"""Whole engines side by side: a request goes where its prefix is, unless too much waits there; counted in rows."""

from __future__ import annotations

import tomllib
from itertools import repeat
from pathlib import Path

import pytest

from phasewise.bench.prompts import random_prompts
from phasewise.bench.workloads import Fixed, lengths, workload
from phasewise.cli import main
from phasewise.cluster.prefix_routing import PrefixRouting
from phasewise.errors import UserError
from phasewise.methods.place.replicated import Replicated
from phasewise.options import parse
from phasewise.plan.arrivals import Load
from phasewise.plan.simulate import goodput, run
from phasewise.request.params import SLO, Params
from phasewise.request.request import Request
from tests import tiny
from tests.place.test_pools import Bench
from tests.plan.scenarios import Linear, in_turn, scenario

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


QUEUE = {"schedule": "prefill_first:budget=1"}  # one prompt per step, a second each: a queue with one server


def test_replicas_that_take_turns_are_queues_of_their_own() -> None:
    """Each is an M/D/1 queue of every third request, in closed form."""
    jobs = Load(Fixed(8, 1), 300, 2.4, seed=1).jobs(SLO())
    outcome = run(scenario(Linear(1.0), "replicated:workers=3,route=turns", **QUEUE), jobs)
    for number in range(3):
        own = outcome.jobs[number::3]
        assert [job.ttft for job in own] == pytest.approx(in_turn(own, repeat(1.0)))


@pytest.mark.parametrize("route", ["prefix", "load", "turns"])
def test_replicas_carry_what_as_many_engines_do_and_no_more_than_they_can(route: str) -> None:
    """A second for each prompt, four at the most until its first token. Work bounds the rate: until the last target
    three workers have so many seconds, and nine tenths of the requests need one each."""
    load, slo, n = Load(Fixed(8, 1), 200, 1.0), SLO(4.0), 200
    one = goodput(scenario(Linear(1.0), **QUEUE), load, slo)
    three = goodput(scenario(Linear(1.0), f"replicated:workers=3,route={route}", **QUEUE), load, slo)
    assert three.rate >= 3 * one.rate * 0.98, "the search's precision"
    last = max(job.arrived for job in load.jobs(slo, three.rate))
    assert 0.9 * n <= 3 * (last + 4.0)


def test_a_planner_tries_replicas_and_may_choose_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert Replicated.sizes(4) == ["workers=2", "workers=3", "workers=4"]
    assert Replicated.sizes(1) == []
    plan = tmp_path / "plan.toml"
    with pytest.raises(SystemExit) as ended:
        main(["plan", "--device", "h100", "--model", "pocket", "--devices", "2", "--requests", "200", "--ttft", "0.5",
              "--places", "colocated|replicated:workers=2", "--schedules", "sarathi", "--config", str(plan),
              "--workload", "fixed:prompt=1000,new=2"])  # fmt: skip
    said = capsys.readouterr()
    assert not ended.value.code, said.err
    assert tomllib.loads(plan.read_text())["place"] == "replicated:workers=2", said.out
