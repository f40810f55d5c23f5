"""A controller that splits a machine's cores between the phases and moves them (arXiv 2504.19867).

    TTFT(x) = a1 / (x - load) + b1        x: cores of prefill; load: arrivals per second times seconds of one core each
    TPOT(y) = a2 / y + b2                 y: cores of decode

Time is service time over cores, and prompts queue (M/M/1): a1 is then the service time, and b1, b2 are zero. All four
are fitted to what was seen. Numbers and an injected clock only, so the controller can be tested without workers
(tests/cluster/test_core_split.py plays the machine). That cores are not all that counts (memory bandwidth, threads that
wait for each other) is left to the fit.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

RIDGE = 1e-3  # how little offsets are believed in where one share only was ever seen
Metric = Literal["ttft", "tpot"]


# ---- fits
def line(points: Sequence[tuple[float, float]]) -> tuple[float, float] | None:
    """Least squares t = a u + b over (u, t), neither negative; with one u only, b is taken for zero. None: no point."""
    if not points:
        return None
    n, us, ts = len(points), [u for u, _ in points], [t for _, t in points]
    uu, ut, su, st = sum(u * u for u in us), sum(u * t for u, t in points), sum(us), sum(ts)
    if uu == 0.0:
        return 0.0, st / n
    full = n * (1.0 + RIDGE)
    det = uu * full - su * su
    a, b = (ut * full - su * st) / det, (uu * st - su * ut) / det
    if a < 0.0:
        return 0.0, st / n
    return (ut / uu, 0.0) if b < 0.0 else (a, b)


def quantile(values: Sequence[float], q: float) -> float:
    """The least value that at least a share `q` of them does not exceed."""
    return sorted(values)[max(0, math.ceil(q * len(values)) - 1)]


# ---- splits
@dataclass(frozen=True)
class Split:
    """Cores on which each phase may run, ids. Where they overlap, the phases take turns."""

    prefill: tuple[int, ...]
    decode: tuple[int, ...]

    @property
    def both(self) -> int:
        return len({*self.prefill} & {*self.decode})

    @property
    def x(self) -> float:
        """Prefill's part, in cores, while both phases are busy."""
        return len(self.prefill) - self.both / 2

    @property
    def y(self) -> float:
        """Decode's part, in cores."""
        return len(self.decode) - self.both / 2

    def cores(self, role: str) -> tuple[int, ...]:
        return self.prefill if role == "prefill" else self.decode


def ladder(cores: Sequence[int]) -> list[Split]:
    """Splits from most cores for decode to most for prefill, a core a step. Between the ends the phases have cores of
    their own; at the ends one phase runs on all, and the other shares a single one with it."""
    every, n = tuple(cores), len(cores)
    if n == 1:
        return [Split(every, every)]
    own = [Split(every[:k], every[k:]) for k in range(1, n)]
    return [Split(every[:1], every), *own, Split(every, every[-1:])]


# ---- the controller
@dataclass(frozen=True)
class Goals:
    """Targets in seconds that a share `attain` of the samples has to meet, and how fast to react to those missed.

    Every `window` seconds the phases are judged, each by `least` samples or not at all; after a move not before `dwell`
    seconds. A split that was tried within the last `memory` judgements is only gone back to if the phase that gives
    cores is then expected to stay `margin` below its target.
    """

    ttft: float
    tpot: float
    attain: float = 0.9
    window: float = 2.0
    dwell: float = 5.0
    least: int = 8
    margin: float = 0.1
    memory: int = 30
    steps: int = 1

    def of(self, metric: Metric) -> float:
        return self.ttft if metric == "ttft" else self.tpot


@dataclass(frozen=True)
class SplitWindow:
    """One window's measurements: its split, the prompts' load in cores, both quantiles (None = not judged)."""

    at: int
    load: float
    ttft: float | None
    tpot: float | None

    def of(self, metric: Metric) -> float | None:
        return self.ttft if metric == "ttft" else self.tpot


@dataclass
class _Window:
    """Samples since the last judgement: (arrived, ttft), seconds per token, and seconds that prompts were served."""

    since: float
    firsts: list[tuple[float, float]] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    services: list[float] = field(default_factory=list)


class CoreSplit:
    """Moves cores to the phase that misses its target while the other one meets it. If both miss theirs, or both meet
    them, nothing changes; so there is no target at which it could swing."""

    def __init__(self, splits: Sequence[Split], goals: Goals, now: float, at: int | None = None) -> None:
        self.splits, self.goals = list(splits), goals
        self.at = len(splits) // 2 if at is None else at
        self.moves = 0
        self.seen: deque[SplitWindow] = deque(maxlen=goals.memory)
        self._window = _Window(now)
        self._due = now + goals.window
        self._served = now  # when the last prompt was done

    @property
    def split(self) -> Split:
        return self.splits[self.at]

    # ---- samples
    def first(self, arrived: float, now: float) -> None:
        """A request got its first token. Prompts are taken to be served one after the other."""
        self._window.firsts.append((arrived, now - arrived))
        self._window.services.append(now - max(arrived, self._served))
        self._served = now

    def token(self, seconds: float) -> None:
        """A request got another token, so long after the one before."""
        self._window.gaps.append(seconds)

    # ---- decisions
    def due(self, now: float) -> bool:
        return now >= self._due

    def decide(self, now: float, waiting: Iterable[float] = ()) -> bool:
        """Judge the window; `waiting` are the arrivals of requests without a token. -> whether the split has changed"""
        goals = self.goals
        seen = self._judge(now, list(waiting))
        self.seen.append(seen)
        self._window, self._due = _Window(now), now + goals.window
        missed: list[Metric] = [metric for metric in METRICS if (seen.of(metric) or 0.0) > goals.of(metric)]
        if len(missed) != 1:
            return False
        target = self._target(missed[0], seen)
        if target is None:
            return False
        self.at, self.moves = target, self.moves + 1
        self._due = now + max(goals.window, goals.dwell)
        return True

    def _judge(self, now: float, waiting: Sequence[float]) -> SplitWindow:
        window, goals = self._window, self.goals
        late = [now - arrived for arrived in waiting if now - arrived > goals.ttft]  # they miss it, by how much ever
        firsts = [ttft for _, ttft in window.firsts] + late
        came = sum(arrived >= window.since for arrived in [*(arrived for arrived, _ in window.firsts), *waiting])
        service = sum(window.services) / len(window.services) if window.services else 0.0
        load = came / max(now - window.since, 1e-9) * service * self.split.x
        ttft = quantile(firsts, goals.attain) if len(firsts) >= goals.least else None
        tpot = quantile(window.gaps, goals.attain) if len(window.gaps) >= goals.least else None
        return SplitWindow(self.at, load, ttft, tpot)

    def _target(self, missed: Metric, seen: SplitWindow) -> int | None:
        """The nearest split at which the target missed is expected to be met, at most `steps` away; None = stay."""
        other: Metric = "tpot" if missed == "ttft" else "ttft"
        step = 1 if missed == "ttft" else -1
        found = None
        for at in range(self.at + step, self.at + step * (self.goals.steps + 1), step):
            if not 0 <= at < len(self.splits) or self._spoils(other, at, seen):
                break
            found = at
            if (self.expected(missed, at, seen.load) or math.inf) <= self.goals.of(missed):
                break
        return found

    def _spoils(self, metric: Metric, at: int, seen: SplitWindow) -> bool:
        """Returns whether a target that is met now would be missed at a split that is known."""
        if seen.of(metric) is None or not any(old.at == at and old.of(metric) is not None for old in self.seen):
            return False
        expected = self.expected(metric, at, seen.load)
        return expected is not None and expected > (1.0 - self.goals.margin) * self.goals.of(metric)

    def expected(self, metric: Metric, at: int, load: float) -> float | None:
        """Seconds at a split, by the curve through what was seen; None if nothing was."""
        fitted = self.fitted(metric)
        u = self._u(metric, at, load)
        if fitted is None:
            return None
        return fitted[0] * u + fitted[1] if math.isfinite(u) else math.inf

    def fitted(self, metric: Metric) -> tuple[float, float] | None:
        """(a, b) of a curve."""
        points = [(self._u(metric, old.at, old.load), old.of(metric)) for old in self.seen]
        return line([(u, value) for u, value in points if value is not None and math.isfinite(u)])

    def _u(self, metric: Metric, at: int, load: float) -> float:
        """The variable that a curve is linear in; infinite where prompts come faster than they can be done."""
        split = self.splits[at]
        if metric == "tpot":
            return 1.0 / split.y
        return 1.0 / (split.x - load) if split.x > load else math.inf


METRICS: tuple[Metric, Metric] = ("ttft", "tpot")
