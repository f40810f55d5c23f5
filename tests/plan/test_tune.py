"""Successive halving on numbers made by hand: who is dropped when and why, and who may never be chosen."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import pytest

from phasewise.bench.drive import Drive, HeldKV
from phasewise.bench.quality import averaged, graded
from phasewise.bench.settings import DEFAULT, BenchSetting, SettingTrial
from phasewise.bench.workloads import Shot
from phasewise.errors import UserError
from phasewise.plan.candidates import changes_answers, pairs, singles
from phasewise.plan.effort import LEAST_ROUNDS, Pace, estimate, fitted
from phasewise.plan.loss import Loss, limit_of, lost
from phasewise.plan.tune import FINALISTS, SEEDS, Candidate, RungBudget, Tuner, front, ranked
from phasewise.request.counters import Counters
from phasewise.request.params import Params
from phasewise.request.request import Departure, Request

LOOKUP, RECYCLING, INT8 = "draft=prompt_lookup", "draft=token_recycling", "store=int8"
SNAPKV, UNIFIED, QUEST = "evict=snapkv", "skip=unified", "attend=quest"
SPEED = {LOOKUP: 1.5, RECYCLING: 1.2, INT8: 1.1, SNAPKV: 1.3, UNIFIED: 1.4, QUEST: 0.8, "draft=aded": 0.7}
LOSS = {INT8: 0.001, SNAPKV: 0.002, UNIFIED: 0.2, QUEST: 0.0}


def verbs_of(name: str) -> dict[str, str]:
    return BenchSetting.parse(name).verbs


@dataclass
class Track:
    """A race whose runners take the time that SPEED says; pairs are as fast as both together."""

    settings: Sequence[BenchSetting]
    refused: dict[str, str] = field(default_factory=dict)
    trials: list[SettingTrial] = field(default_factory=list)

    def run(self, rounds: int, shots: Callable[[int], list[Shot]]) -> Iterator[int]:
        for number in range(rounds):
            (shot,) = shots(number)
            for name in [DEFAULT, *(one.name for one in self.settings)]:
                if name == "draft=aded":
                    self.refused[name] = "aded: no corpus"
                    continue
                speed = 1.0
                for word in name.split() if name != DEFAULT else ():
                    speed *= SPEED[word]
                request = Request([1, 2], Params(max_tokens=4))
                request.tokens.extend([3] * 4)
                request.left = Departure("finished", "length")
                seconds = (1 + shot.new) / speed  # rounds differ, the ratio does not
                self.trials.append(
                    SettingTrial(name, number, Drive(seconds, Counters(emitted=4), 9, [request], [HeldKV(70, 80)]), 1.0)
                )
                yield len(self.trials)


class Bench:
    """What was asked for, and of whom."""

    def __init__(self, losses: Mapping[str, float] = LOSS, spread: float = 0.001) -> None:
        self.losses, self.spread = losses, spread
        self.raced: list[list[str]] = []
        self.weighed: list[tuple[str, int, int]] = []
        self.rounds: list[int] = []

    def race(self, settings: Sequence[BenchSetting]) -> Track:
        self.raced.append([one.name for one in settings])
        return Track(settings)

    def shots(self, number: int) -> list[Shot]:
        self.rounds.append(number)
        return [Shot(0.0, [number], number)]

    def weigh(self, verbs: dict[str, str], examples: int, seed: int) -> list[Loss]:
        name = " ".join(f"{verb}={method}" for verb, method in verbs.items())
        self.weighed.append((name, examples, seed))
        mean = sum(self.losses.get(word, 0.0) for word in name.split())
        half = self.spread * (50 / examples) ** 0.5
        return [Loss("code", mean, mean - half, mean + half, examples)]

    def tune(self, names: Sequence[str], limit: float = 0.01) -> tuple[list[Candidate], Tuner]:
        tuner = Tuner(self.race, self.shots, self.weigh, limit)
        return tuner.run([BenchSetting.parse(name) for name in names], RungBudget()), tuner


def test_the_fastest_that_is_allowed_wins_and_pairs_are_tried() -> None:
    bench = Bench()
    found, tuner = bench.tune(list(SPEED))
    assert set(found[0].name.split()) == {LOOKUP, SNAPKV, INT8} or found[0].speed == pytest.approx(1.5 * 1.3, rel=0.2)
    assert found[0].allowed(0.01) and found[0].within == pytest.approx((found[0].speed, found[0].speed))
    assert any(" " in name for name in bench.raced[1]), "no pair was tried"
    assert not any(UNIFIED in one.name for one in found), "what is certain to lose too much is not in the final"
    assert "loses +20.0%" in str(tuner.candidates[UNIFIED].out)
    assert tuner.candidates["draft=aded"].out == "aded: no corpus"
    assert "others are faster" in str(tuner.candidates[QUEST].out)
    assert bench.rounds == list(range(len(bench.rounds))), "a prompt came twice"


def test_exact_recipes_are_never_weighed_and_finalists_by_other_examples() -> None:
    bench = Bench()
    found, tuner = bench.tune([LOOKUP, RECYCLING, SNAPKV])
    assert {name for name, _, _ in bench.weighed} == {
        name for name in tuner.candidates if changes_answers(BenchSetting.parse(name))
    }
    last = [seed for _, _, seed in bench.weighed]
    assert last == sorted(last) and set(last) == set(SEEDS)
    assert all(examples == 50 for _, examples, seed in bench.weighed if seed == SEEDS[1])
    assert all(one.losses[0].n == 50 for one in found if one.lossy)


@pytest.mark.parametrize("mean", [0.0, 0.005, 0.0099, 0.02])
def test_an_interval_that_crosses_the_limit_is_never_chosen(mean: float) -> None:
    """However fast, and however near its mean."""
    found, _ = Bench({SNAPKV: mean}, spread=0.004).tune([SNAPKV, RECYCLING])
    chosen = found[0]
    assert chosen.loss <= 0.01
    assert (SNAPKV in chosen.name) == (mean + 0.004 <= 0.01)
    found, _ = Bench({SNAPKV: 0.0}, spread=0.02).tune([SNAPKV])
    assert found[0].name == DEFAULT and not found[1].allowed(0.01)


def test_what_is_not_certainly_faster_comes_after_the_default() -> None:
    def one(name: str, speed: float, low: float, lossy: bool = False) -> Candidate:
        return Candidate(
            BenchSetting.parse(name) if name != DEFAULT else BenchSetting(DEFAULT), lossy, speed, (low, speed + 0.1)
        )

    found = [
        one(LOOKUP, 1.3, 0.9),
        one(RECYCLING, 1.1, 1.05),
        one(DEFAULT, 1.0, 1.0),
        one(SNAPKV, 9.0, 8.0, lossy=True),
    ]
    assert [each.name for each in ranked(found, 0.01)] == [RECYCLING, DEFAULT, LOOKUP, SNAPKV]
    assert ranked([found[0], Candidate(BenchSetting(DEFAULT), False)], 0.01)[0].name == DEFAULT


def test_the_front_is_that_of_all_pairs() -> None:
    def one(name: str, speed: float, loss: float, kv: float) -> Candidate:
        return Candidate(BenchSetting(name), True, speed, None, kv, [Loss("code", loss, loss, loss, 9)])

    some = [
        one("a", 2.0, 0.1, 50),
        one("b", 1.0, 0.0, 100),
        one("c", 1.5, 0.2, 60),
        one("d", 1.0, 0.0, 40),
        one("e", 2.0, 0.1, 50),
    ]
    worth = {each.name: (-each.speed, each.losses[0].mean, each.kv_bytes) for each in some}
    want = {
        a for a in worth
        if not any(worth[b] != worth[a] and all(x <= y for x, y in zip(worth[b], worth[a])) for b in worth)
    }  # fmt: skip
    assert front(some) == want == {"a", "d", "e"}


def test_pairs_join_different_verbs_once() -> None:
    some = [BenchSetting.parse(name) for name in (LOOKUP, RECYCLING, INT8, SNAPKV)]
    names = {one.name for one in pairs(some, some)}
    assert len(names) == 5 and all(len(name.split()) == 2 for name in names)
    assert pairs(some, [*some, *pairs(some, some)]) == []
    assert {one.name for one in singles()} >= {LOOKUP, INT8} and not any("schedule" in one.verbs for one in singles())


def test_losses_are_shares_of_the_defaults() -> None:
    found = lost("code", averaged("code", "nats/token", [2.0, 4.0]), averaged("code", "nats/token", [2.2, 4.2]))
    assert (found.mean, found.low, found.high) == pytest.approx((0.2 / 3, 0.2 / 3, 0.2 / 3))
    right = lost("copy", graded("copy", [True] * 40), graded("copy", [True] * 30 + [False] * 10))
    assert right.mean == 0.25 and 0.05 < right.low < 0.25 < right.high < 0.45
    same = lost("copy", graded("copy", [True] * 40), graded("copy", [True] * 40))
    assert same.mean == 0 and same.high > 0.01, "forty answers cannot show that less than one in a hundred is lost"


@pytest.mark.parametrize("text", ["-1%", "100%", "x", "1.5", "nan", ""])
def test_limits_are_shares(text: str) -> None:
    with pytest.raises(UserError, match="must be a share"):
        limit_of(text)


def test_limits_in_percent_or_not() -> None:
    assert limit_of("1%") == limit_of("0.01") == 0.01 and limit_of("0") == 0


def test_few_candidates_have_a_rung_and_a_final() -> None:
    bench = Bench()
    found, _ = bench.tune([RECYCLING])
    assert [one.name for one in found] == [RECYCLING, DEFAULT] and len(bench.raced) == 2
    assert FINALISTS >= 2 and found[1].kv_bytes == 70.0


@pytest.mark.parametrize(
    "names", [[RECYCLING], [LOOKUP, RECYCLING, INT8, SNAPKV], [n for n in SPEED if "aded" not in n]]
)
def test_the_estimate_counts_what_is_done(names: list[str]) -> None:
    """Every timed run and every judged example, where nothing is refused or refuted; never less."""
    bench = Bench({}, spread=0.0)
    runs: list[Track] = []
    tuner = Tuner(lambda some: runs.append(bench.race(some)) or runs[-1], bench.shots, bench.weigh, 0.01)
    settings = [BenchSetting.parse(name) for name in names]
    tuner.run(settings, RungBudget())
    done = sum(len(run.trials) for run in runs)
    judged = sum(examples for _, examples, _ in bench.weighed)
    clock = estimate(settings, Pace(8, run=1.0), 8, RungBudget()).seconds
    answers = estimate(settings, Pace(8, run=0.0, example=1.0), 8, RungBudget()).seconds
    assert done <= clock <= 1.5 * done and judged <= answers <= 3 * max(judged, 1)


def test_a_time_is_kept_by_cutting_examples_then_rounds_then_requests() -> None:
    some = [BenchSetting.parse(name) for name in (LOOKUP, RECYCLING, SNAPKV)]
    whole = fitted(some, Pace(8, run=1.0, example=1.0), RungBudget(), 1e9)
    assert (whole.requests, whole.budget.final) == (8, (5, 50))
    fewer = fitted(some, Pace(8, run=1.0, example=1.0), RungBudget(), 180.0)
    assert fewer.seconds <= 180 and fewer.requests == 8 and fewer.budget.final[1] < 50
    slow = fitted(some[:2], Pace(8, run=20.0), RungBudget(), 180.0)
    assert slow.seconds <= 180 and slow.budget.final[0] == LEAST_ROUNDS and 1 <= slow.requests < 8
    assert fitted(some[:2], Pace(8, run=1e4), RungBudget(), 180.0).seconds > 180, "said, where nothing is left to cut"
