"""The expected length of a tuning run, and the part of it that fits into the time that is allowed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from phasewise.bench.settings import BenchSetting
from phasewise.plan.candidates import changes_answers, pairs
from phasewise.plan.tune import FINALISTS, RungBudget

LEAST_ROUNDS = 3  # fewer have no interval
LEAST_EXAMPLES = 2
FOR_ANSWERS = 0.6  # share of the time allowed that judging answers may take, where any are judged


@dataclass(frozen=True)
class Pace:
    """Measured seconds: of one run of the default with `requests` requests, and of one example over all rows."""

    requests: int
    run: float
    example: float = 0.0


@dataclass(frozen=True)
class TuneEffort:
    """The work of a tuning run: requests of each timed run, rounds and examples, and the `seconds` all of it takes."""

    requests: int
    budget: RungBudget
    seconds: float

    def said(self) -> str:
        """The estimate in words."""
        if self.seconds < 5:
            return "a few seconds"
        minutes = self.seconds / 60
        return f"about {self.seconds:.0f} seconds" if minutes < 1.5 else f"about {minutes:.0f} minutes"


def estimate(settings: Sequence[BenchSetting], pace: Pace, requests: int, budget: RungBudget) -> TuneEffort:
    """The effort of `Tuner.run` with these settings, if every candidate is as fast as the default."""
    lossy = sum(map(changes_answers, settings))
    runs, examples = _counts(len(settings), lossy, len(pairs(settings, settings)), budget)
    return TuneEffort(requests, budget, runs * pace.run * requests / pace.requests + examples * pace.example)


def fitted(settings: Sequence[BenchSetting], pace: Pace, budget: RungBudget, allowed: float) -> TuneEffort:
    """The largest effort that takes at most `allowed` seconds, or else the least there is.

    Examples are cut first, then rounds, then requests: every contender is still asked the same.
    """
    answers = FOR_ANSWERS * allowed if any(map(changes_answers, settings)) else 0.0
    whole = estimate(settings, pace, pace.requests, budget)
    if whole.seconds <= allowed:
        return whole
    clock = replace(pace, example=0.0)
    judged = replace(pace, run=0.0)
    rounds, examples = budget.final
    if answers:
        examples = _most(LEAST_EXAMPLES, examples, lambda n: _seconds(settings, judged, budget, rounds, n) <= answers)
    spent = _seconds(settings, judged, budget, rounds, examples)
    rounds = _most(LEAST_ROUNDS, rounds, lambda n: _seconds(settings, clock, budget, n, examples) + spent <= allowed)
    cut = _budget(budget, rounds, examples)
    requests = _most(
        1, pace.requests, lambda n: estimate(settings, clock, n, cut).seconds + spent <= allowed
    )  # fmt: skip
    return estimate(settings, pace, requests, cut)


def _seconds(settings: Sequence[BenchSetting], pace: Pace, budget: RungBudget, rounds: int, examples: int) -> float:
    return estimate(settings, pace, pace.requests, _budget(budget, rounds, examples)).seconds


def _budget(budget: RungBudget, rounds: int, examples: int) -> RungBudget:
    return replace(budget, examples=min(budget.examples, examples), final=(rounds, examples))


def _most(least: int, most: int, fits: Callable[[int], bool]) -> int:
    """The largest number from `least` to `most` that fits, or `least`."""
    return next((number for number in range(most, least, -1) if fits(number)), least)


def _counts(alive: int, lossy: int, new_pairs: int, budget: RungBudget) -> tuple[int, int]:
    """Timed runs, and examples judged over all rows, of successive halving as `Tuner.run` does it.

    Of pairs, at most as many are counted as the first rung's survivors can make.
    """
    rounds, examples, runs, judged, paired = budget.rounds, budget.examples, 0, 0, False
    while alive > FINALISTS or not paired:
        runs += rounds * (1 + alive)
        alive = min(alive, max(FINALISTS, (alive + 1) // 2))
        lossy = min(lossy, alive)
        judged += (1 + lossy) * examples if lossy else 0
        if not paired:
            exact = alive - lossy
            added = min(new_pairs, alive * (alive - 1) // 2)
            alive, paired = alive + added, True
            lossy += max(0, added - exact * (exact - 1) // 2) if lossy else 0
        rounds, examples = 2 * rounds, 2 * examples
    finalists = min(alive, FINALISTS)
    runs += budget.final[0] * (1 + finalists)
    judged += (1 + min(lossy, finalists)) * budget.final[1] if lossy else 0
    return runs, judged
