"""Draft sizes that pay: the time that a step of more rows takes, and the best size for guesses of known chances."""

from __future__ import annotations

import math
from collections.abc import Sequence
from heapq import heapify, heapreplace
from typing import TYPE_CHECKING, NamedTuple

from phasewise.verbs.draft import Draft

if TYPE_CHECKING:
    pass

MOST_ROWS = 512  # of steps whose time is looked at
LEVEL = 0.9  # what a step leaves of the times before it: machines change their speed within seconds
SHAPE = 0.99  # what a difference between two steps leaves of those before it: what a row costs hardly changes
PRIOR_SHARE = 0.05  # what a further row is taken to cost before it was seen, as a share of a step of one row
PRIOR_WEIGHT = 16.0  # how firmly: as if so many steps had been seen that were one row apart
POOLED_WEIGHT = 64.0  # likewise what was seen of steps of any number of requests ...
ALL = 0  # ... which are counted here
SPIKE, JUMP = 3.0, 0.3  # times what was expected, and share of a step beside it: what differs by more was disturbed
STATED = 1 << 16  # kinds from here on are likelihoods that were stated, in thousandths
DEEPEST, LAST_RANK = 7, 3  # of kinds of guesses: what is deeper or further behind counts with these


class CostLine(NamedTuple):
    """Seconds of a step: `base` as it is, `row` more for every further row."""

    base: float
    row: float


class StepCosts:
    """A running estimate of the seconds that a step takes by its rows, for about as many requests.

    The time of a step of one row is forgotten quickly, for machines change their speed within seconds. What a further
    row costs, as a share of that, is learned from the differences between one step and the next, and kept for long.
    """

    def __init__(self) -> None:
        self._weight = self._total = 0.0  # of the times of steps, their further rows taken out
        self._slopes: dict[int, list[float]] = {}  # power of two of the requests -> [joint, apart] of differences
        self._last: tuple[int, int, float] | None = None

    def note(self, requests: int, rows: int, seconds: float, follows: bool = True) -> None:
        """A step, and whether it `follows` the one noted before."""
        if not follows:
            self._last = None
        if not 0 < rows <= MOST_ROWS:
            self._last = None
            return
        share = self._share(requests)
        times = 1 + share * (rows - 1)
        if self._weight > 1:  # known well enough to tell what is disturbed
            seconds = min(seconds, SPIKE * times * self._total / self._weight)
        self._weight = LEVEL * self._weight + 1
        self._total = LEVEL * self._total + seconds / times
        if self._last is not None and self._last[0] == requests and self._last[1] != rows:
            self._differ(*self._last, rows, seconds)
        self._last = requests, rows, seconds

    def compare(self, requests: int, rows: int, seconds: float) -> None:
        """A step with guesses among steps without: it tells of the price of rows alone."""
        line = self.near(requests)
        if line is not None and requests < rows <= MOST_ROWS:
            self._differ(requests, requests, line.base, rows, seconds)

    def near(self, requests: int) -> CostLine | None:
        """Returns the costs of a step of so many requests' pending tokens, and a few rows more; None before any was
        seen."""
        if not self._weight:
            return None
        share, one = self._share(requests), self._total / self._weight
        return CostLine(one * (1 + share * (requests - 1)), one * share)

    def _share(self, requests: int) -> float:
        joint, apart = self._slopes.get(ALL, (0.0, 0.0))
        pooled = (joint + PRIOR_WEIGHT * PRIOR_SHARE) / (apart + PRIOR_WEIGHT)
        joint, apart = self._slopes.get(requests.bit_length(), (0.0, 0.0))
        return max(0.0, (joint + POOLED_WEIGHT * pooled) / (apart + POOLED_WEIGHT))

    def _differ(self, requests: int, before: int, seconds: float, rows: int, now: float) -> None:
        """Two steps, one after the other, that differ in their rows."""
        share, more = self._share(requests), rows - before
        one = (seconds + now) / (2 + share * (rows + before - 2))
        most = JUMP + 2 * share * abs(more)
        for kind in (ALL, requests.bit_length()):
            slope = self._slopes.setdefault(kind, [0.0, 0.0])
            slope[0] = SHAPE * slope[0] + more * max(-most, min(most, (now - seconds) / one))
            slope[1] = SHAPE * slope[1] + more * more


def kinds(draft: Draft, sort: int) -> list[int]:
    """A number per node: guesses with equal ones are taken to be equally likely where their parent is right. Such are
    those whose drafter says so, or else those of equal depth, place among their siblings and `sort`."""
    if draft.likely is not None:
        return [STATED + round(1000 * likely) for likely in draft.likely]
    found, depths, born = list[int](), list[int](), dict[int, int]()
    for parent in draft.parents:
        depth = 0 if parent < 0 else depths[parent] + 1
        rank = born[parent] = born.get(parent, -1) + 1
        depths.append(depth)
        found.append(kind(sort, depth, rank))
    return found


def kind(sort: int, depth: int, rank: int = 0) -> int:
    return (sort * (DEEPEST + 1) + min(depth, DEEPEST)) * (LAST_RANK + 1) + min(rank, LAST_RANK)


def reached(parents: Sequence[int], chances: Sequence[float]) -> list[float]:
    """Returns the chance that each node is accepted: the product of the chances along its path."""
    found = list[float]()
    for parent, chance in zip(parents, chances, strict=True):
        found.append(chance if parent < 0 else chance * found[parent])
    return found


class DraftPlan(NamedTuple):
    """The number of each request's guesses that are worth their rows, and the mean gain in the logarithm of their
    speeds."""

    sizes: list[int]
    gain: float


def plan(likely: Sequence[Sequence[float]], cost: CostLine) -> DraftPlan:
    """The numbers of guesses that make the product of all requests' speeds largest (proportional fairness), by one
    guess after another.

    `likely`: per request of the step, how likely its guesses are accepted, likeliest first; none where it has none.
    A guess makes its own request faster and every one of the step slower. For one request this is the most tokens per
    second; for several nobody's speed is bought with much of the others'.
    """
    n, most = len(likely), sum(map(len, likely))
    sizes, tokens = [0] * n, [1.0] * n
    ahead = [(-math.log1p(each[0]), i) for i, each in enumerate(likely) if each]
    heapify(ahead)
    least = n * math.log1p(cost.row / (cost.base + cost.row * most))  # no guess costs less, the later the cheaper
    best, gain, seconds = DraftPlan(list(sizes), 0.0), 0.0, cost.base
    while ahead and -ahead[0][0] > least:
        worth, i = -ahead[0][0], ahead[0][1]
        gain += worth - n * math.log1p(cost.row / seconds)
        seconds += cost.row
        tokens[i] += likely[i][sizes[i]]
        sizes[i] += 1
        if gain > best.gain:
            best = DraftPlan(list(sizes), gain)
        left = likely[i][sizes[i]] if sizes[i] < len(likely[i]) else 0.0
        heapreplace(ahead, (-math.log1p(left / tokens[i]), i))
    return DraftPlan(best.sizes, best.gain / n if n else 0.0)
