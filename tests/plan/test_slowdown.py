"""Splitwise's nine conditions, and what a budget buys: against closed forms, whole simulations and the command."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from phasewise.bench.latency import percentile
from phasewise.bench.workloads import Fixed, lengths
from phasewise.cli import main
from phasewise.errors import UserError
from phasewise.plan.arrivals import Load
from phasewise.plan.layout import Layout
from phasewise.plan.misses import Missed
from phasewise.plan.search import Question, SearchSpace, search
from phasewise.plan.sequence import SimulatedRequest
from phasewise.plan.setting import ServerSetting
from phasewise.plan.simulate import run, within
from phasewise.plan.slowdown import LIMITS, QUANTILES, Slowdowns, SlowdownWatch
from phasewise.request.params import SLO
from phasewise.request.request import Departure
from tests.plan.scenarios import Linear, scenario
from tests.plan.test_layout import PAIR, costs

COST = Linear(0.01, row=0.0002, prompt=0.001)
NINE = Slowdowns(COST)
LOAD = Load(lengths("lognormal:prompt=200,longest=800,new=12,new_longest=60"), 150, None, 1.0, 4)


def test_a_request_alone_is_not_slowed_down() -> None:
    jobs = replace(LOAD, requests=5).jobs(SLO(), 1e-3)
    run(scenario(COST, schedule="splitwise"), jobs)
    for job in jobs:
        assert NINE.of(job) == {name: pytest.approx(1.0) for name in LIMITS}
    assert NINE.over(jobs) == pytest.approx(1.0 / 1.25)


def done(ttft: float, rest: float, new: int = 11) -> SimulatedRequest:
    """A request of 100 rows that took so many times as long as alone until its first token, and from there on."""
    job = SimulatedRequest("a", range(100), new, 0.0)
    job.first_token = ttft * COST.base + ttft * 0.12
    job.last_token = job.first_token + rest * (new - 1) * 0.0102
    job.known += new
    job.left = Departure("finished", "length")
    return job


@pytest.mark.parametrize(
    ("slow", "share", "over"),
    [
        ((6.1, 1.0), 0.03, 6.1 / 6),  # P99 of TTFT
        ((3.1, 1.0), 0.15, 3.1 / 3),  # P90
        ((2.1, 1.0), 0.6, 2.1 / 2),  # P50
        ((1.0, 1.6), 0.15, 1.6 / 1.5),  # P90 of TPOT
        ((1.0, 1.3), 0.6, 1.3 / 1.25),
        ((1.0, 1.0), 1.0, 0.8),
    ],
)
def test_each_quantile_has_its_limit(slow: tuple[float, float], share: float, over: float) -> None:
    jobs = [done(*(slow if i < 200 * share else (1.0, 1.0))) for i in range(200)]
    worst = max(
        (percentile([NINE.of(job)[name] for job in jobs], q) or 0.0) / limit
        for name, limits in LIMITS.items()
        for q, limit in zip(QUANTILES, limits, strict=True)
    )
    assert NINE.over(jobs) == pytest.approx(worst) and worst >= over - 1e-9
    watch = SlowdownWatch(NINE, jobs)
    try:
        for job in jobs:
            watch.left(job, 0.0)
    except Missed:
        assert worst > 1
    else:
        assert worst <= 1
    jobs[0].left = Departure("failed", "no room")
    assert NINE.over(jobs) == math.inf
    with pytest.raises(Missed):
        SlowdownWatch(NINE, jobs).left(jobs[0], 0.0)


@pytest.mark.parametrize("place", ["colocated", "splitwise:prompt=1,token=1"])
def test_what_is_given_up_early_does_not_hold_in_the_end(place: str) -> None:
    made, answers = scenario(COST, place, schedule="splitwise"), []
    for rate in (0.003, 0.5, 2.0, 4.0):
        jobs = LOAD.jobs(SLO(), rate)
        answers.append(within(made, LOAD.jobs(SLO(), rate), NINE))
        assert answers[-1] == (NINE.over(run(made, jobs).jobs) <= 1.0)
    assert {*answers} == {True, False}


ASKED = Question(Load(Fixed(100, 6), 40, None, 1.0, 3), SLO(), costs, ServerSetting(kv_bytes=1 << 30), "iso-cost",
                 0.1, 5.0, Slowdowns(Linear(0.01, prompt=0.002, row=0.0002)))  # fmt: skip


def test_a_budget_is_filled_with_whole_servers() -> None:
    """Of devices at 1 $/h each, 5 $/h buy five engines or two pairs."""
    space = SearchSpace(4, ["colocated", PAIR], ("splitwise",), layouts=(Layout(""), Layout("", 2)))
    brute = search(space, ASKED, prune=False)
    for one in brute:
        copies = 5 // one.devices
        assert ASKED.copies(one.choice, one.devices) == copies
        assert one.worth == pytest.approx(copies * one.rate) and one.rate > 0
    assert {one.devices for one in brute} == {1, 2, 3, 4}
    assert search(space, ASKED)[0] == brute[0]
    with pytest.raises(UserError, match="what a budget buys"):
        replace(ASKED, budget=math.inf)


def test_slow_downs_that_nobody_keeps_are_named() -> None:
    faster = replace(ASKED, slowdowns=Slowdowns(Linear(0.001, prompt=0.0002)))
    space = SearchSpace(1, ["colocated"], ("splitwise",), layouts=(Layout(""),))
    with pytest.raises(UserError, match="missed at any rate; the nearest: colocated, .* is .* times beyond"):
        search(space, replace(faster, goal="goodput"))


WORDS = ["plan", "--model", "pocket", "--requests", "60", "--workload", "fixed:prompt=500,new=4", "--devices", "2",
         "--places", PAIR, "--schedules", "splitwise", "--kinds", "h100|h100-350w"]  # fmt: skip


def test_by_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "p.toml"
    words = ["--slowdown", "1x1@a100", "--goal", "iso-power", "--budget", "2200", "--config", str(config)]
    with pytest.raises(SystemExit) as ended:
        main([*WORDS, *words])
    said = capsys.readouterr()
    assert not ended.value.code, said.err
    assert "requests/s within the budget" in said.out and "chosen: 2 x disaggregated" in said.out
    assert (
        "h100-350w" in config.read_text() and json.loads(config.with_suffix(".plan.json").read_text())["ttft"] is None
    )


@pytest.mark.parametrize(("more", "error"), [
    (["--slowdown", "1x1@a100", "--ttft", "1"], "takes the place of targets"),
    (["--slowdown", "a100"], "is no layout"), (["--goal", "iso-cost", "--ttft", "5"], "say --budget"),
    (["--slowdown", "1x1@a100", "--replan", "http://127.0.0.1:9"], "cannot be watched"),
])  # fmt: skip
def test_mistakes_are_named(capsys: pytest.CaptureFixture[str], more: list[str], error: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*WORDS, *more])
    assert ended.value.code == 2 and error in capsys.readouterr().err
