"""Who gets the cores: the closed forms, the fits, and a controller that converges on a simulated machine and stays."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest

from phasewise.cluster.core_split import CoreSplit, Goals, Split, ladder, line, quantile

GOALS = Goals(ttft=1.0, tpot=0.1, window=1.0, dwell=2.0, least=4)


# ---- the closed form that the controller's curve for TTFT stands for
def sojourn(rate: float, service: float, share: float) -> float:
    """Mean seconds from arrival to the end of service (M/M/1) with a `share` of what serves in `service` seconds."""
    free = share - rate * service
    return service / free if free > 0 else math.inf


# ---- fits
def test_a_line_is_found_again() -> None:
    a, b = line([(u, 0.3 * u + 0.02) for u in (0.5, 1.0, 2.0, 4.0)]) or (0, 0)
    assert a == pytest.approx(0.3, rel=0.01) and b == pytest.approx(0.02, rel=0.05)


def test_one_share_only_gives_a_curve_without_offset() -> None:
    a, b = line([(0.5, 0.2)] * 5) or (0, 0)
    assert a == pytest.approx(0.4) and b == pytest.approx(0.0, abs=1e-9)


def test_neither_coefficient_is_negative() -> None:
    assert line([(1.0, 1.0), (2.0, 0.5)]) == (0.0, 0.75)
    a, b = line([(1.0, 0.1), (2.0, 1.1)]) or (0, 0)
    assert (a, b) == (pytest.approx((0.1 + 2.2) / 5), 0.0)
    assert line([]) is None


def test_a_quantile_is_a_sample() -> None:
    values = [0.4, 0.1, 0.3, 0.2]
    assert [quantile(values, q) for q in (0.01, 0.25, 0.5, 0.9, 1.0)] == [0.1, 0.1, 0.2, 0.4, 0.4]


# ---- splits
def test_a_ladder_of_two_and_of_four_cores() -> None:
    assert ladder([3]) == [Split((3,), (3,))]
    assert ladder([0, 1]) == [Split((0,), (0, 1)), Split((0,), (1,)), Split((0, 1), (1,))]
    assert [(s.x, s.y) for s in ladder([4, 5, 6, 7])] == [(0.5, 3.5), (1, 3), (2, 2), (3, 1), (3.5, 0.5)]


@pytest.mark.parametrize("n", [1, 2, 3, 8])
def test_every_step_of_a_ladder_moves_cores_one_way(n: int) -> None:
    splits = ladder(range(n))
    assert all(a.x < b.x and a.y > b.y for a, b in pairwise(splits))
    assert all(s.x + s.y == pytest.approx(n) and s.prefill and s.decode for s in splits)


# ---- the controller
class Machine:
    """TTFT and TPOT by the formulas, with noise, at whatever split the controller has chosen."""

    def __init__(self, cores: int, goals: Goals, noise: float = 0.05) -> None:
        self.shares = CoreSplit(ladder(range(cores)), goals, 0.0)
        self.rng = np.random.default_rng(1)
        self.noise, self.now = noise, 0.0
        self.rate, self.service, self.a2, self.b2 = 1.0, 0.1, 0.02, 0.01
        self.path = [self.shares.at]

    def first(self, at: int) -> float:
        """Seconds to a first token; in overload it takes as long as the queue has grown by then."""
        x = self.shares.splits[at].x
        return min(self.service / x + sojourn(self.rate, self.service, x), 20.0)

    def token(self, at: int) -> float:
        return self.a2 / self.shares.splits[at].y + self.b2

    def run(self, seconds: float) -> list[int]:
        """-> the splits that were in force, without repetitions"""
        end, start = self.now + seconds, len(self.path) - 1
        while self.now < end:
            self.now += 1.0 / self.rate / 4
            wobble = 1.0 + self.noise * self.rng.uniform(-1, 1, 2)
            if self.rng.uniform() < 0.25:
                self.shares.first(self.now - self.first(self.shares.at) * wobble[0], self.now)
            self.shares.token(self.token(self.shares.at) * wobble[1])
            if self.shares.due(self.now):
                self.shares.decide(self.now)
                if self.shares.at != self.path[-1]:
                    self.path.append(self.shares.at)
        return self.path[start:]

    def feasible(self) -> list[int]:
        """By trying every split."""
        goals = self.shares.goals
        every = range(len(self.shares.splits))
        return [at for at in every if self.first(at) < goals.ttft and self.token(at) < goals.tpot]


def test_it_goes_where_both_targets_are_met_and_stays() -> None:
    machine = Machine(8, Goals(ttft=1.0, tpot=0.03, window=2.0, dwell=4.0, least=4))
    machine.rate, machine.service = 20.0, 0.05  # one core's worth of prompts
    assert machine.shares.at in machine.feasible()
    assert machine.run(60) == [4]
    machine.rate, machine.service = 20.0, 0.25  # five cores' worth: the mix has changed
    assert machine.feasible() == [6] and machine.shares.at == 4
    assert machine.run(120) == [4, 5, 6]
    machine.rate, machine.service, machine.a2 = 20.0, 0.02, 0.09
    assert machine.feasible() == [0, 1, 2, 3]
    assert machine.run(120) == [6, 5, 4, 3]
    assert machine.run(600) == [3], "both targets are met: nothing moves"


def test_targets_that_cannot_both_be_met_do_not_make_it_swing() -> None:
    machine = Machine(4, Goals(ttft=0.3, tpot=0.02, window=2.0, dwell=4.0, least=4, memory=30))
    machine.rate, machine.service, machine.a2, machine.b2 = 20.0, 0.1, 0.04, 0.0
    assert not machine.feasible()
    path = machine.run(600)  # 300 windows, of which each is remembered for 30
    assert len(path) <= 2 + 600 / 2 / 30


def test_both_missed_or_both_met_leave_the_split() -> None:
    for first, token in ((2.0, 0.2), (0.5, 0.05)):
        shares = CoreSplit(ladder(range(4)), GOALS, 0.0)
        for now in range(1, 20):
            for _ in range(10):
                shares.first(now - first, float(now))
                shares.token(token)
            assert not shares.decide(float(now))
        assert shares.at == 2 and shares.moves == 0


def test_too_few_samples_are_no_judgement_and_prompts_that_wait_count() -> None:
    shares = CoreSplit(ladder(range(2)), GOALS, 0.0)
    for _ in range(3):
        shares.first(0.0, 5.0)
    assert not shares.decide(5.0)
    assert not shares.decide(10.0, waiting=[9.5] * 9), "they have not waited for too long yet"
    assert shares.decide(15.0, waiting=[1.0] * 4)
    assert shares.split == Split((0, 1), (1,))


def test_moves_are_a_dwell_apart_and_one_core_each() -> None:
    shares = CoreSplit(ladder(range(8)), Goals(ttft=1.0, tpot=0.1, window=1.0, dwell=3.0, least=1), 0.0)
    moved = []
    for now in range(1, 12):
        shares.first(now - 9.0, float(now))
        if shares.due(now) and shares.decide(float(now)):
            moved.append((now, shares.at))
    assert moved == [(1, 5), (4, 6), (7, 7), (10, 8)]


def test_larger_steps_end_where_the_target_is_expected_to_be_met() -> None:
    def moved(ttft: float) -> int:
        goals = Goals(ttft=ttft, tpot=0.1, window=1.0, dwell=1.0, least=1, steps=9)
        shares = CoreSplit(ladder(range(8)), goals, 0.0)
        shares.first(0.0, 4.0)  # four cores: 4 s, of which 16 s of one core each; one prompt in 100 s
        shares.decide(100.0)
        return shares.at

    assert [moved(3.0), moved(2.6), moved(2.2)] == [6, 7, 8]
