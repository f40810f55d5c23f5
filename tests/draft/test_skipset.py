"""The search for sub-layers to leave out: proposals, stops, and the Gaussian process against closed forms."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from itertools import combinations
from statistics import mean

import numpy as np
import pytest

from phasewise.methods.draft import _skipset as skipset
from phasewise.methods.draft._skipset import Search, Sites, Stops, initial

LAYERS, COUNT = 8, 5
ENDLESS = Stops(1.0, 1 << 30, 1 << 30)


def searching(stops: Stops = ENDLESS, every: int = 25, layers: int = LAYERS, ratio: float = 0.45) -> Search:
    return Search(layers, ratio, every, stops)


def worths(seed: int, sites: int = 12) -> Callable[[Sites], float]:
    """A score to which every sub-layer adds its own, from 0 to 1."""
    rng = random.Random(seed)
    own = [rng.random() for _ in range(sites)]
    most = sum(sorted(own)[-COUNT:])
    return lambda sites: sum(own[site] for site in sites) / most


def look(search: Search, score: Callable[[Sites], float], n: int = 1 << 30, text: str = "t") -> list[Sites]:
    """What is proposed, at most `n` times."""
    made: list[Sites] = []
    while not search.done and len(made) < n:
        made.append(search.propose(text))
        search.note(made[-1], score(made[-1]))
    return made


# ---- sets
def test_the_first_set_is_every_second_layer() -> None:
    assert initial(6, 6) == {0, 6, 2, 8, 4, 10} and initial(6, 5) == {0, 6, 2, 8, 4} and initial(6, 0) == set()
    assert initial(6, 8) == {0, 6, 2, 8, 4, 10, 1, 7}
    route = searching().route(initial(6, 5))
    assert route.mixing == {0, 2, 4, 6, 7} and route.feeding == {0, 2, 4, 5, 6, 7}


@pytest.mark.parametrize(("layers", "ratio", "count"), [(8, 0.45, 5), (30, 0.45, 25), (32, 0.45, 27), (2, 0.9, 0)])
def test_how_many_are_left_out(layers: int, ratio: float, count: int) -> None:
    """floor(2 (layers - 2) ratio), never of the first and the last layer."""
    search = searching(layers=layers, ratio=ratio)
    assert search.count == count and search.done == (count == 0)
    for sites in look(search, lambda sites: 0.5, 40):
        route = search.route(sites)
        assert len(sites) == count and route.sublayers == 2 * layers - count
        assert {0, layers - 1} <= route.mixing & route.feeding


def test_proposals_hang_on_the_scores_alone() -> None:
    score = worths(1)
    one, two = (look(searching(every=4), score, 30) for _ in range(2))
    assert one == two
    half = searching(every=4)
    first = look(half, score, 12)
    assert one == first + look(copy.deepcopy(half), score, 18)


def test_the_best_set_stays_and_is_scored_anew_on_another_text() -> None:
    search, score = searching(), worths(2)
    look(search, score, 50)
    best = search.best
    assert search.score == max(score(sites) for sites, _ in search.tried) == score(best)
    assert search.propose("another") == best, "scores of different texts do not compare"
    search.note(best, 0.1)
    assert search.score == 0.1 and search.proposals == 49
    other = search.propose("another")
    assert other != best
    search.note(other, 0.2)
    assert search.best == other


@pytest.mark.parametrize(
    ("stops", "score", "proposals"),
    [
        (Stops(0.9, 50, 99), 0.95, 0),
        (Stops(0.95, 7, 99), 0.95, 7),
        (Stops(1.0, 50, 9), 0.5, 9),
        (Stops(0.9, 50, 0), 0.5, 0),
    ],
)
def test_when_it_ends(stops: Stops, score: float, proposals: int) -> None:
    """Above a score, after so many without a better one, or after so many."""
    search = searching(stops)
    look(search, lambda sites: score)
    assert search.done and search.proposals == proposals


def test_a_better_one_gives_it_patience_again() -> None:
    search, scores = searching(Stops(1.0, 3, 99)), iter([0.1, 0.1, 0.1, 0.2, 0.2, 0.2, 0.2, 0.9])
    look(search, lambda sites: next(scores))
    assert search.proposals == 6 and search.score == 0.2


# ---- the Gaussian process
def test_mean_deviation_and_likelihood_are_those_of_the_textbook() -> None:
    rng = np.random.default_rng(0)
    points, values, ideas = rng.random((7, 4)), rng.random(7), rng.random((5, 4))
    inside = skipset.kernel(points, points, 0.7) + skipset.NOISE * np.eye(7)
    across, inverse = skipset.kernel(points, ideas, 0.7), np.linalg.inv(inside)
    mean_, deviation = skipset.posterior(points, values, ideas, 0.7)
    assert np.allclose(mean_, across.T @ inverse @ values)
    assert np.allclose(deviation**2, 1 - np.diag(across.T @ inverse @ across))
    density = -0.5 * values @ inverse @ values - 0.5 * np.log(np.linalg.det(inside))
    assert np.isclose(skipset.likelihood(points, values, 0.7), density)
    distance = np.sqrt(((points[0] - points[1]) ** 2).sum()) * np.sqrt(5) / 0.7
    assert np.isclose(inside[0, 1], (1 + distance + distance**2 / 3) * np.exp(-distance))


def test_equal_scores_break_nothing() -> None:
    points = np.eye(3)
    assert skipset.promising(points, np.ones(3), np.array([[1.0, 0, 0], [0.5, 0.5, 0.5]])) == 1


def test_it_finds_better_sets_than_chance() -> None:
    """After as many proposals, where what sub-layers are worth adds up; the best of all sets is known."""
    found: dict[int, list[float]] = {1: [], 1 << 30: []}
    for every, scores in found.items():
        for seed in range(6):
            search, score = searching(every=every), worths(seed)
            look(search, score, 30)
            assert search.score is not None
            scores.append(search.score)
    best = max(worths(0)(frozenset(sites)) for sites in combinations(range(12), COUNT))
    assert best == pytest.approx(1.0)
    assert mean(found[1]) > 0.97 and mean(found[1]) > mean(found[1 << 30]) + 0.03
