"""Sizes of guesses: costs are found from steps, chances from texts, and the plan is the best of all."""

from __future__ import annotations

import itertools
import math
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasewise.methods.draft._record import Chances, GuessRecord
from phasewise.request.request import Request
from phasewise.speculation.planner import CostLine, StepCosts, kind, kinds, plan, reached
from phasewise.verbs.draft import Draft


def steps(costs: StepCosts, line: CostLine, rng: Random, requests: int = 1, n: int = 400, drift: float = 0.0) -> None:
    """`drift`: how much slower the machine becomes and faster again, in waves of a hundred steps."""
    for i in range(n):
        rows = requests + rng.randrange(24)
        speed = 1 + drift * math.sin(math.tau * i / 100)
        costs.note(requests, rows, speed * (line.base + line.row * (rows - 1)) * rng.uniform(0.95, 1.05))


@pytest.mark.parametrize("requests", [1, 4, 16, 32])
def test_costs_are_a_line_near_the_step(requests: int) -> None:
    costs, true = StepCosts(), CostLine(6e-3, 0.4e-3)
    steps(costs, true, Random(0), requests)
    found = costs.near(requests)
    assert found is not None
    assert found.base == pytest.approx(true.base + true.row * (requests - 1), rel=0.1)
    assert found.row == pytest.approx(true.row, rel=0.25)


@pytest.mark.parametrize("share", [0.0, 0.02, 0.2])
def test_costs_of_rows_do_not_follow_the_speed_of_the_moment(share: float) -> None:
    """A machine that takes half as long and half as long again within seconds, while guesses come and go."""
    costs, rng = StepCosts(), Random(1)
    steps(costs, CostLine(6e-3, 6e-3 * share), rng, n=600, drift=0.5)
    for i in range(600):
        slow = i // 30 % 2  # guesses nearly always while it is slow, hardly ever while it is not
        rows = rng.randrange(8, 16) if rng.random() < (0.9 if slow else 0.05) else 1
        costs.note(1, rows, (1.5 if slow else 0.5) * 6e-3 * (1 + share * (rows - 1)))
    found = costs.near(1)
    assert found is not None
    assert found.row / found.base == pytest.approx(share, abs=0.02, rel=0.15)


def test_costs_follow_a_machine_that_changes() -> None:
    costs = StepCosts()
    steps(costs, CostLine(6e-3, 0.4e-3), Random(0))
    steps(costs, CostLine(12e-3, 0.1e-3), Random(1), n=600)
    found = costs.near(1)
    assert found is not None
    assert found.base == pytest.approx(12e-3, rel=0.05)
    assert found.row < 0.2e-3


def test_costs_before_much_was_seen() -> None:
    """Nothing known; one kind of step known, where a further row is taken to cost a little; a disturbed step."""
    costs = StepCosts()
    assert costs.near(3) is None
    for _ in range(3):
        costs.note(1, 1, 8e-3)
    found = costs.near(1)
    assert found is not None
    assert found.base == pytest.approx(8e-3)
    assert found.row == pytest.approx(0.05 * 8e-3)
    costs.note(1, 1, 8.0)
    disturbed = costs.near(1)
    assert disturbed is not None
    assert disturbed.base < 2 * 8e-3
    costs.note(1, 9, 8.0)
    costs.note(1, 1, 8e-3)
    disturbed = costs.near(1)
    assert disturbed is not None
    assert disturbed.row < 0.2 * disturbed.base, "one step more says little of what a row costs"


def test_costs_do_not_overflow() -> None:
    costs = StepCosts()
    for _ in range(40_000):
        costs.note(2, 2, 1e-3)
    found = costs.near(2)
    assert found is not None
    assert found.base == pytest.approx(1e-3)


def speed(sizes: tuple[int, ...], likely: list[list[float]], cost: CostLine) -> float:
    tokens = sum(math.log(1 + sum(each[:size])) for each, size in zip(likely, sizes))
    return tokens - len(likely) * math.log((cost.base + cost.row * sum(sizes)) / cost.base)


@given(
    st.lists(st.lists(st.floats(0.0, 1.0), max_size=4), min_size=1, max_size=4),
    st.floats(0.0, 2.0),
)
def test_the_plan_is_the_best_of_all(raw: list[list[float]], row: float) -> None:
    """Against every choice of sizes."""
    likely, cost = [sorted(each, reverse=True) for each in raw], CostLine(1.0, row)
    found = plan(likely, cost)
    best = max(speed(sizes, likely, cost) for sizes in itertools.product(*(range(len(each) + 1) for each in likely)))
    assert speed(tuple(found.sizes), likely, cost) == pytest.approx(best, abs=1e-9)
    assert found.gain * len(likely) == pytest.approx(best, abs=1e-9)


def test_alone_it_is_the_most_tokens_per_second() -> None:
    likely, cost = [[0.9, 0.7, 0.4, 0.1]], CostLine(1.0, 0.2)
    rates = [(1 + sum(likely[0][:n])) / (1 + 0.2 * n) for n in range(5)]
    assert plan(likely, cost).sizes == [rates.index(max(rates))]
    assert plan(likely, CostLine(1.0, 1.0)).sizes == [0]
    assert plan([], cost).sizes == []


def test_one_request_does_not_slow_many_down() -> None:
    """What pays for a request alone need not pay beside others, who bear its rows."""
    sure, cost = [0.5] * 8, CostLine(1.0, 0.05)
    assert plan([sure], cost).sizes[0] > 4
    assert plan([sure, *([] for _ in range(15))], cost).sizes[0] == 0


def test_kinds_are_of_depth_and_place() -> None:
    tree = Draft([5, 6, 7, 8, 9], [-1, -1, 0, 0, 2])
    places = [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0)]
    assert kinds(tree, 3) == [kind(3, *place) for place in places]
    assert len({kind(sort, depth, rank) for sort in range(7) for depth in range(8) for rank in range(4)}) == 7 * 8 * 4


def test_what_a_drafter_says_is_a_kind_and_where_counting_begins() -> None:
    """Stated likelihoods count until trials outweigh them."""
    tree, chances = Draft([5, 6, 7], [-1, -1, 0], likely=[0.8, 0.1, 0.8]), Chances()
    first, other, deep = kinds(tree, 3)
    assert first == deep != other
    assert (chances.of(first), chances.of(other)) == (pytest.approx(0.8), pytest.approx(0.1))
    for _ in range(400):
        chances.note(first, False)
    assert chances.of(first) < 0.02 and chances.of(other) == pytest.approx(0.1)


def test_reached_multiplies_along_paths() -> None:
    assert reached([-1, -1, 0, 2], [0.5, 0.25, 0.5, 0.1]) == [0.5, 0.25, 0.25, 0.025]


def test_the_text_says_which_guesses_were_right() -> None:
    """Guesses that never ran count, each once, where their parent was right, however the text arrives."""
    tree = Draft([5, 6, 7, 8, 9], [-1, -1, 0, 0, 2])
    for cuts in ([3], [1, 2, 3], [2, 3]):
        chances, record, request = Chances(), GuessRecord(), Request([1, 2])
        record.watch(tree, kinds(tree, 0), request.known)
        for end in cuts:
            request.tokens[2:] = [5, 7, 4][:end]
            record.settle(request.tokens, chances)
        assert record.watched is None
        tried = {kind: round(tried) for kind, (tried, _) in record.counts.items()}
        right = {kind: round(right) for kind, (_, right) in record.counts.items()}
        assert tried == dict.fromkeys(kinds(tree, 0), 1)
        assert right == {kind(0, 0, 0): 1, kind(0, 0, 1): 0, kind(0, 1, 0): 1, kind(0, 1, 1): 0, kind(0, 2, 0): 0}


def test_a_watched_guess_is_not_replaced() -> None:
    record, chances = GuessRecord(), Chances()
    first = Draft.chain([5, 6, 7])
    record.watch(first, kinds(first, 0), 1)
    record.settle([1, 5], chances)
    record.watch(Draft.chain([9]), [0], 2)
    assert record.watched is not None
    assert record.watched.draft is first
    record.settle([1, 5, 6, 7], chances)
    record.settle([1, 5, 6, 7, 8], chances)
    assert record.watched is None
    assert chances.of(kind(0, 2)) > 0.7


def test_chances_are_found() -> None:
    """Of a kind, within three standard errors of some five hundred trials; of one never tried, its parents'."""
    chances, rng = Chances(), Random(0)
    for _ in range(5000):
        chances.note(kind(2, 0), rng.random() < 0.7)
    assert chances.of(kind(2, 0)) == pytest.approx(0.7, abs=0.06)
    assert chances.of(kind(2, 4)) == chances.of(kind(2, 0))
    assert chances.of(kind(1, 0)) == 0.5
    record = GuessRecord()
    for _ in range(50):
        draft = Draft.chain([5])
        record.watch(draft, kinds(draft, 2), 0)
        record.settle([6], chances)
    assert record.chance(kind(2, 0), chances) < 0.2 < chances.of(kind(2, 0))
