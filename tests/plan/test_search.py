"""The search against brute force and closed forms, with costs that are known."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from phasewise.bench.goodput import SHARE
from phasewise.bench.workloads import Fixed
from phasewise.errors import UserError
from phasewise.plan import side_by_side
from phasewise.plan.arrivals import Load
from phasewise.plan.misses import Met, Missed, MissWatch
from phasewise.plan.search import (
    FEW,
    FEWEST,
    SHORT,
    Assumption,
    Choice,
    Question,
    SearchSpace,
    TooShort,
    Tried,
    places,
    replicas,
    runner_up,
    search,
    sensitivity,
)
from phasewise.plan.setting import CostsByRole, ServerSetting
from phasewise.plan.simulate import run
from phasewise.request.params import SLO
from tests.plan.scenarios import Linear

COST = Linear(base=0.01, prompt=0.0005, row=0.0005)
SMALL = SearchSpace(3, places(3), ("sarathi:budget=256", "prefill_first"))


def test_a_load_that_ends_too_soon_says_so() -> None:
    with pytest.raises(TooShort, match="all 60 requests at once are in time"):
        search(SMALL, question(SLO(1000.0, None)))


def question(slo: SLO, cost: Any = COST, **more: Any) -> Question:
    load = Load(Fixed(prompt=100, new=20), 60, None, 1.0, 3)
    return Question(load, slo, lambda choice: CostsByRole(lambda role, threads: cost, lambda role: 1 << 30, 1024, 4, 1),
                    ServerSetting(kv_bytes=1 << 30), precision=0.05, **more)  # fmt: skip


TARGETS = question(SLO(0.3, 0.05))


@cache
def found() -> Tried:
    """What suits TARGETS best."""
    return search(SMALL, TARGETS)[0]


def test_pool_sizes_are_all_there() -> None:
    found = places(3)
    assert found == ["colocated", "disaggregated:prefill=1,decode=1", "disaggregated:prefill=1,decode=2",
                     "disaggregated:prefill=2,decode=1", "replicated:workers=2", "replicated:workers=3",
                     "splitwise:prompt=1,token=1", "splitwise:prompt=1,token=2", "splitwise:prompt=2,token=1",
                     "splitwise:prompt=1,token=1,mixed=1"]  # fmt: skip
    assert places(1) == ["colocated"]
    mixed = [name.partition("mixed=")[2] for name in places(8) if name.startswith("splitwise")]
    assert Counter(mixed) == {"": 28, "1": 21, "2": 15, "4": 6}


def test_workers_of_one_machine_divide_its_cores() -> None:
    """A server takes the machine whole, however many workers it has; pools that lend KV are among them."""
    found = places(2, machine=True)
    assert found == ["colocated", "disaggregated:prefill=1,decode=1", "replicated:workers=2", "semi_pd",
                     "splitwise:prompt=1,token=1"]  # fmt: skip
    asked = question(SLO(0.6, None))
    asked = replace(asked, load=replace(asked.load, requests=40))
    machine = replace(asked, source=lambda choice: replace(asked.source(choice), machine=True))
    best = search(SearchSpace(1, found, ("sarathi:budget=256",)), machine, prune=False)
    assert {one.choice.place for one in best} == {*found} and {one.devices for one in best} == {1}
    assert {one.devices for one in search(SearchSpace(2, places(2), ("sarathi:budget=256",)), asked, prune=False)} == {
        1,
        2,
    }


@pytest.mark.parametrize("processes", [1, 2])
def test_pruning_changes_no_winner(processes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that was given up early is better than the first two, measured to the end: on one core or on two, with
    a load that is long enough to try a short one first or not."""
    asked = question(SLO(0.3, 0.05))
    space = SearchSpace(3, places(3), SMALL.schedules)
    if processes == 2:
        monkeypatch.setattr("phasewise.plan.search.FEWEST", asked.load.requests // SHORT)
    assert len(list(space.choices())) > FEW and asked.load.requests < SHORT * FEWEST
    told: list[str] = []
    firsts: list[str] = []

    def tell(done: int, note: str = "") -> None:
        (told if done else firsts).append(note)

    brute = search(space, asked, prune=False)
    pruned = search(space, asked, tell, processes=processes)
    assert len(brute) == len(pruned) == len(told) == len(list(space.choices()))
    assert any(one.pruned for one in pruned), "nothing was spared"
    assert len(firsts) == (len(brute) if processes == 2 else 0)
    ends = {one.choice: one for one in brute}
    for mine, theirs in zip(pruned[:2], brute[:2]):
        assert not mine.pruned and mine == ends[mine.choice]
        assert mine.worth == theirs.worth
    assert told[-1].startswith(f"best so far: {pruned[0].choice}") or pruned[0].worth == pruned[1].worth


def test_a_short_load_that_tells_nothing_of_some_orders_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seven requests at once are in time wherever they go: any rate would do for all."""
    monkeypatch.setattr("phasewise.plan.search.FEWEST", 60 // SHORT)
    monkeypatch.setattr("phasewise.plan.search.FEW", 2)
    space = SearchSpace(2, places(2), ("sarathi:budget=256",))
    asked = question(SLO(1.0, None))
    assert len(list(space.choices())) > 2
    short = replace(asked, load=replace(asked.load, requests=60 // SHORT))
    with pytest.raises(TooShort):
        search(space, short, prune=False)
    assert search(space, asked)[0] == search(space, asked, prune=False)[0]


@pytest.mark.thorough  # 198 choices, each measured to the end
def test_a_whole_case_of_eight_devices_has_the_exhaustive_winner(monkeypatch: pytest.MonkeyPatch) -> None:
    """All placements of eight devices, mixed pools among them, as `phasewise plan --exhaustive` would try them."""
    monkeypatch.setattr("phasewise.plan.search.FEWEST", 60 // SHORT)
    space = SearchSpace(8, places(8), ("sarathi:budget=256", "splitwise"))
    asked = replace(question(SLO(0.3, 0.05)), load=Load(Fixed(100, 10), 60, None, 1.0, 3))
    brute = search(space, asked, prune=False, processes=2)
    pruned = search(space, asked, processes=2)
    assert len(brute) == len(pruned) == 2 * len(places(8)) and sum(one.pruned for one in pruned) > 150
    assert pruned[:2] == brute[:2]


def test_an_error_in_another_process_is_raised_here() -> None:
    with pytest.raises(TooShort, match="all 60 requests at once are in time"):
        search(SMALL, question(SLO(1000.0, None)), processes=2)


def test_work_goes_on_beside_and_errors_come_back() -> None:
    def work(item: int, hint: int) -> int:
        if item == 3:
            raise UserError("three")
        return item * item + hint

    found = dict(side_by_side.each(range(6), work, lambda: 100, 2))
    assert str(found.pop(3)) == "three" and found == {n: n * n + 100 for n in range(6) if n != 3}
    assert found.items() < dict(side_by_side.each(range(6), work, lambda: 100, 1)).items()
    with pytest.raises(RuntimeError, match="has ended"):
        list(side_by_side.each(range(4), lambda item, hint: os._exit(1), lambda: 0, 2))


@pytest.mark.parametrize("place", ["colocated", "splitwise:prompt=1,token=1,mixed=1"])
def test_what_is_sure_early_is_so_in_the_end(place: str) -> None:
    choice, sure = Choice(place, "sarathi:budget=256"), Counter[str]()
    for slo in (SLO(0.3, 0.05), SLO(0.3), SLO(None, 0.05), SLO(0.5, 0.2, 0.3)):
        asked = replace(TARGETS, slo=slo)
        scenario = asked.scenario(choice)
        for rate in (1.0, 4.0, 6.0, 8.0, 12.0, 40.0):
            whole = asked.at(choice, rate).share(slo)
            assert asked.holds(scenario, rate) == (whole >= SHARE)
            jobs = asked.load.jobs(slo, rate)
            try:
                run(scenario, jobs, watch=MissWatch(slo, SHARE, len(jobs), early=True))
            except (Met, Missed) as early:
                sure[type(early).__name__] += any(job.left is None for job in jobs)
    assert sure["Met"] and sure["Missed"], "nothing was known before the end"


def test_the_rate_is_one_that_holds_and_the_next_does_not() -> None:
    asked, best = TARGETS, found()
    assert asked.at(best.choice, best.rate).share(asked.slo) >= SHARE
    assert asked.at(best.choice, best.rate * 1.2).share(asked.slo) < SHARE


def test_impossible_targets_name_the_nearest() -> None:
    """Alone, a prompt of 100 rows takes 0.01 + 0.1 s; a token of one row 0.0105 s."""
    with pytest.raises(UserError, match=r"missed at any rate; the nearest: .* has TTFT 110 ms") as failed:
        search(SearchSpace(1, ["colocated"], ("sarathi:budget=256",)), question(SLO(0.05, None)))
    assert "90 %" in str(failed.value)
    with pytest.raises(UserError, match="nothing can be built of 1 devices"):
        search(SearchSpace(1, ["disaggregated:prefill=1,decode=1"], ["sarathi"]), question(SLO(1.0, None)))


def test_sensitivity_says_when_the_choice_would_be_another() -> None:
    asked, first = TARGETS, found()
    slower = replace(asked, source=question(asked.slo, Linear(0.02, 0.001, 0.001)).source)
    other = Tried(Choice("colocated", "sarathi:budget=256"), 1, 1.0, 1e-9)
    told = sensitivity(first, other, [Assumption("as it is", asked), Assumption("steps take twice as long", slower)])
    assert told[0][:2] == ("as it is", pytest.approx(1.0))
    assert told[1][1] < 0.7
    assert sensitivity(first, None, [Assumption("as it is", asked)])[0][2] is False


def test_as_many_servers_as_a_rate_needs() -> None:
    one = Tried(Choice("colocated", "sarathi"), 2, 3.0, 1.5)
    assert (replicas(one, 8, None), replicas(one, 8, 3.0), replicas(one, 8, 3.1)) == (4, 1, 2)
    with pytest.raises(UserError, match="need 10 devices .* carry 12 requests/s"):
        replicas(one, 8, 13.0)


def test_the_runner_up_is_another_placement() -> None:
    def one(place: str, worth: float, pruned: bool = False) -> Tried:
        return Tried(Choice(place, "sarathi"), 1, worth, worth, pruned)

    a, b, c, d = one("colocated", 4), one("colocated", 3), one("splitwise:prompt=1,token=1", 2), one("semi_pd", 9, True)
    assert runner_up([a, b, c, d]) is c and runner_up([a, b, d]) is b and runner_up([a, d]) is None
