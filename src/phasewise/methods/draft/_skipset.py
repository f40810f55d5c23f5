"""Which sub-layers to leave out: a search that goes on while text is generated (SWIFT, arXiv 2410.06916)."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from phasewise.model.thinned import Route

Floats = NDArray[np.float64]
Sites = frozenset[int]  # numbers of sub-layers: the attentions of all layers but the first and the last, then the MLPs

NOISE, KAPPA = 1e-2, 2.5  # of the Gaussian process; how many deviations above its mean count
SPREADS = (0.5, 1.0, 2.0, 4.0)  # length scales that are tried, in units of the distance of two disjoint sets
REMEMBERED, IDEAS = 256, 256  # scores that the process knows; sets among which it chooses


@dataclass(frozen=True, slots=True)
class Stops:
    """When the search ends: above this score, after so many proposals without a better one, or after so many."""

    score: float
    patience: int
    most: int


class Search:
    """Looks for the `count` sub-layers that can best be left out. Proposals are drawn at random, every `every`-th is
    the best of many by a Gaussian process over the scores so far. Deterministic given the scores.

    Scores of different texts do not compare: when the `text` changes, the best set is scored anew before others are.
    """

    def __init__(self, layers: int, ratio: float, every: int, stops: Stops) -> None:
        self.layers, self.every, self.stops = layers, every, stops
        self.inner = max(0, layers - 2)
        self.count = int(2 * self.inner * ratio)
        self.best = initial(self.inner, self.count)
        self.score: float | None = None  # of the best set, on the text that was scored last
        self.tried: list[tuple[Sites, float]] = []  # scores less that of the set that was best when their text began
        self.proposals = self.idle = 0
        self.done = stops.most == 0 or not 0 < self.count < 2 * self.inner
        self.text, self._base = "", 0.0
        self._random = random.Random(0)

    def route(self, left_out: Sites) -> Route:
        attention = [site + 1 for site in left_out if site < self.inner]
        mlp = [site - self.inner + 1 for site in left_out if site >= self.inner]
        return Route.without(self.layers, attention, mlp)

    def propose(self, text: str) -> Sites:
        """The set to be scored next, on the text of this name."""
        if self.score is None or text != self.text:
            self.text, self.score = text, None
            return self.best
        if (self.proposals + 1) % self.every or not self.tried:
            return self._draw()
        ideas = [self._draw() for _ in range(IDEAS)] + [self._swap() for _ in range(IDEAS)]
        known = self.tried[-REMEMBERED:]
        points, values = self._points([sites for sites, _ in known]), np.array([score for _, score in known])
        return ideas[promising(points, values, self._points(ideas))]

    def note(self, sites: Sites, score: float) -> None:
        """Takes the outcome of the proposal."""
        if self.score is None:
            self.score = self._base = score
        else:
            self.proposals += 1
            self.idle += 1
            if score > self.score:
                self.best, self.score, self.idle = sites, score, 0
        self.tried.append((sites, score - self._base))
        stops = self.stops
        self.done = self.score > stops.score or self.idle >= stops.patience or self.proposals >= stops.most

    def _draw(self) -> Sites:
        return frozenset(self._random.sample(range(2 * self.inner), self.count))

    def _swap(self) -> Sites:
        """The best set but for one sub-layer."""
        gone = self._random.choice(sorted(self.best))
        come = self._random.choice(sorted(set(range(2 * self.inner)) - self.best))
        return self.best - {gone} | {come}

    def _points(self, sets: Sequence[Sites]) -> Floats:
        """Each set as a corner of the cube, float64 [n, sub-layers], disjoint sets at distance 1."""
        points = np.zeros((len(sets), 2 * self.inner))
        for point, sites in zip(points, sets):
            point[list(sites)] = 1 / np.sqrt(2 * max(1, self.count))
        return points


def initial(inner: int, count: int) -> Sites:
    """The first set of so many sub-layers: both halves of every second layer, from the first on; then of the others."""
    pairs = [(layer, layer + inner) for layer in (*range(0, inner, 2), *range(1, inner, 2))]
    return frozenset([site for pair in pairs for site in pair][:count])


# ---- a Gaussian process
def promising(points: Floats, values: Floats, ideas: Floats) -> int:
    """Which of the ideas [m, d] may be worth most, `KAPPA` deviations above its mean, given the values at points
    [n, d]."""
    scale = float(values.std()) or 1.0
    known = (values - values.mean()) / scale
    spread = max(SPREADS, key=lambda each: likelihood(points, known, each))
    mean, deviation = posterior(points, known, ideas, spread)
    return int((mean + KAPPA * deviation).argmax())


def posterior(points: Floats, values: Floats, ideas: Floats, spread: float) -> tuple[Floats, Floats]:
    """Mean and standard deviation at each idea."""
    factor = np.linalg.cholesky(_noisy(points, spread))
    across = np.linalg.solve(factor, kernel(points, ideas, spread))
    mean = across.T @ np.linalg.solve(factor, values)
    return mean, np.sqrt(np.maximum(1 - (across**2).sum(0), 0.0))


def likelihood(points: Floats, values: Floats, spread: float) -> float:
    """Log of the values' density, but for a constant."""
    factor = np.linalg.cholesky(_noisy(points, spread))
    return float(-0.5 * (np.linalg.solve(factor, values) ** 2).sum() - np.log(np.diag(factor)).sum())


def kernel(a: Floats, b: Floats, spread: float) -> Floats:
    """Matern 5/2, [n, m]."""
    squares = (a**2).sum(1)[:, None] + (b**2).sum(1)[None] - 2 * a @ b.T
    r = np.sqrt(5 * np.maximum(squares, 0.0)) / spread
    found: Floats = (1 + r + r**2 / 3) * np.exp(-r)
    return found


def _noisy(points: Floats, spread: float) -> Floats:
    return kernel(points, points, spread) + NOISE * np.eye(len(points))
