"""How many guesses pay: what a step of more rows takes, how often guesses were right, and the best of both."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heapify, heapreplace
from typing import TYPE_CHECKING, NamedTuple

from phasewise.verbs.draft import Draft, Drafter

if TYPE_CHECKING:
    from phasewise.request.request import Request

MOST_ROWS = 512  # of steps whose time is remembered
FADE = 1.02  # a step counts so many times as much as the one before it
RENEW = 1e9  # weights are scaled down when one has grown to this
PRIOR_SHARE = 0.05  # what a further row is taken to cost before it was seen, as a share of a step of one row
PRIOR_WEIGHT = 16.0  # how firmly: as if so many steps one row from the mean had been seen
SPIKE = 3.0  # a step that takes so many times what was expected was disturbed
OWN_WEIGHT = 5.0  # a request's own record counts half once it has so many trials
OWN_FADE, ALL_FADE = 0.95, 0.998  # what a trial leaves of the trials of its kind before it
DEEPEST, LAST_RANK = 7, 3  # of kinds of guesses: what is deeper or further behind counts with these


class Line(NamedTuple):
    """Seconds of a step: `base` as it is, `row` more for every further row."""

    base: float
    row: float


class Costs:
    """What steps of so many rows have taken, as a line near any number of rows; the past fades."""

    def __init__(self) -> None:
        self._seen: dict[int, list[float]] = {}  # rows -> [weight, weighted seconds]
        self._weight = 1.0

    def note(self, rows: int, seconds: float) -> None:
        if not 0 < rows <= MOST_ROWS:
            return
        seen = self._seen.setdefault(rows, [0.0, 0.0])
        if seen[0] > self._weight:  # known well enough to tell what is disturbed
            seconds = min(seconds, SPIKE * seen[1] / seen[0])
        self._weight *= FADE
        seen[0] += self._weight
        seen[1] += self._weight * seconds
        if self._weight > RENEW:
            for each in self._seen.values():
                each[:] = each[0] / RENEW, each[1] / RENEW
            self._weight /= RENEW

    def near(self, rows: int) -> Line | None:
        """Of a step of `rows` rows and a few more; None before any was seen."""
        near = [(n, w, y) for n, (w, y) in self._seen.items() if rows <= 2 * n and n <= 10 * rows + 8]
        total = sum(w for _, w, _ in near)
        if total <= 1e-9 * self._weight:
            return None
        mean = sum(w * n for n, w, _ in near) / total
        middle = sum(y for *_, y in near) / total
        apart = sum(w * (n - mean) ** 2 for n, w, _ in near)
        joint = sum(y * (n - mean) for n, _, y in near) - middle * sum(w * (n - mean) for n, w, _ in near)
        prior = PRIOR_SHARE * middle / (1 + PRIOR_SHARE * (mean - 1))
        firm = PRIOR_WEIGHT * self._weight
        row = max(0.0, (joint + firm * prior) / (apart + firm))
        return Line(max(middle + row * (rows - mean), 0.1 * middle), row)


def sort_of(drafter: Drafter, request: Request) -> int:
    """How good the drafter takes its last guess for the request to be; 0 if it does not say (see Drafter)."""
    say = getattr(drafter, "sort", None)
    return 0 if say is None else int(say(request))


def kinds(draft: Draft, sort: int) -> list[int]:
    """A number per node: guesses with equal ones, of equal depth, place among their siblings and `sort`, are taken to
    be equally likely where their parent is right."""
    found, depths, born = list[int](), list[int](), dict[int, int]()
    for parent in draft.parents:
        depth = 0 if parent < 0 else depths[parent] + 1
        rank = born[parent] = born.get(parent, -1) + 1
        depths.append(depth)
        found.append(kind(sort, depth, rank))
    return found


def kind(sort: int, depth: int, rank: int = 0) -> int:
    return (sort * (DEEPEST + 1) + min(depth, DEEPEST)) * (LAST_RANK + 1) + min(rank, LAST_RANK)


class Chances:
    """How often guesses of a kind were right where their parent was, in all requests; the past fades."""

    def __init__(self) -> None:
        self._counts: dict[int, list[float]] = {}  # kind -> [tried, right]

    def of(self, kind: int) -> float:
        """Before any was tried: half. A kind never tried is as likely as that of the parents was."""
        while (found := self._counts.get(kind)) is None and kind // (LAST_RANK + 1) % (DEEPEST + 1):
            kind -= LAST_RANK + 1
        return 0.5 if found is None else (found[1] + 0.5) / (found[0] + 1)

    def note(self, kind: int, right: bool) -> None:
        counts = self._counts.setdefault(kind, [0.0, 0.0])
        counts[0] = ALL_FADE * counts[0] + 1
        counts[1] = ALL_FADE * counts[1] + right


@dataclass(slots=True)
class Watched:
    """A guess whose end the request's text has not reached yet: right down to `node`, whose token is before `at`."""

    draft: Draft
    kinds: Sequence[int]
    at: int
    node: int = -1


@dataclass(slots=True)
class Record:
    """What became of one request's guesses. Whether they ran does not matter: the text says which were right."""

    watched: Watched | None = None
    counts: dict[int, list[float]] = field(default_factory=dict)  # kind -> [tried, right]

    def settle(self, tokens: Sequence[int], chances: Chances) -> None:
        """Hold the guess that is watched against the text so far."""
        watched = self.watched
        if watched is None:
            return
        for at in range(watched.at, len(tokens)):
            after = None
            for child in watched.draft.children(watched.node):
                right = watched.draft.tokens[child] == tokens[at]
                after = child if right else after
                chances.note(watched.kinds[child], right)
                counts = self.counts.setdefault(watched.kinds[child], [0.0, 0.0])
                counts[:] = OWN_FADE * counts[0] + 1, OWN_FADE * counts[1] + right
            if after is None:
                self.watched = None
                return
            watched.node, watched.at = after, at + 1

    def watch(self, draft: Draft, kinds: Sequence[int], known: int) -> None:
        """Unless another guess is still watched."""
        if self.watched is None:
            self.watched = Watched(draft, kinds, known)

    def chance(self, kind: int, chances: Chances) -> float:
        """That a guess of this kind is right if its parent is."""
        common, own = chances.of(kind), self.counts.get(kind)
        return common if own is None else (own[1] + OWN_WEIGHT * common) / (own[0] + OWN_WEIGHT)


def reached(parents: Sequence[int], chances: Sequence[float]) -> list[float]:
    """That each node is accepted: the product of the chances along its path."""
    found = list[float]()
    for parent, chance in zip(parents, chances, strict=True):
        found.append(chance if parent < 0 else chance * found[parent])
    return found


class Plan(NamedTuple):
    """How many of each request's guesses are worth their rows, and the mean gain in the logarithm of their speeds."""

    sizes: list[int]
    gain: float


def plan(likely: Sequence[Sequence[float]], cost: Line) -> Plan:
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
    best, gain, seconds = Plan(list(sizes), 0.0), 0.0, cost.base
    while ahead and -ahead[0][0] > least:
        worth, i = -ahead[0][0], ahead[0][1]
        gain += worth - n * math.log1p(cost.row / seconds)
        seconds += cost.row
        tokens[i] += likely[i][sizes[i]]
        sizes[i] += 1
        if gain > best.gain:
            best = Plan(list(sizes), gain)
        left = likely[i][sizes[i]] if sizes[i] < len(likely[i]) else 0.0
        heapreplace(ahead, (-math.log1p(left / tokens[i]), i))
    return Plan(best.sizes, best.gain / n if n else 0.0)
