"""Which servers to build from so many devices: placements, pool sizes, schedules, degrees and recipes, tried in the
simulator (DistServe's search, arXiv 2401.09670, with whole requests judged by both targets)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Literal

from phasewise import catalog
from phasewise.bench.goodput import SHARE
from phasewise.bench.latency import TAIL, percentile
from phasewise.errors import UserError
from phasewise.plan.arrivals import Load
from phasewise.plan.setting import CostsByRole, ServerSetting
from phasewise.plan.simulate import Best, LoadOutcome, Scenario, goodput, run
from phasewise.request.params import SLO

Goal = Literal["goodput", "cost", "power"]
TRICKLE = 1e-3  # requests/s at which nobody waits for anybody


class TooShort(UserError):
    """The load ends before anybody has to wait: it says nothing of a rate."""


@dataclass(frozen=True)
class Choice:
    """One kind of server: `ways` devices share every layer of each of its workers, whose layers are divided among
    `stages` such groups; `depth`: guesses of a decode."""

    place: str
    schedule: str
    recipe: str = ""
    ways: int = 1
    depth: int = 0
    stages: int = 1

    def __str__(self) -> str:
        words = [self.place, self.schedule]
        words += [f"recipe {self.recipe}"] if self.recipe else []
        words += [f"{self.ways} devices per {'stage' if self.stages > 1 else 'worker'}"] if self.ways > 1 else []
        words += [f"{self.stages} stages"] if self.stages > 1 else []
        words += [f"{self.depth} guess{'es' if self.depth > 1 else ''} a step"] if self.depth else []
        return ", ".join(words)


@dataclass(frozen=True)
class SearchSpace:
    """The search space: every combination whose server has no more than `devices` devices."""

    devices: int
    places: Sequence[str]
    schedules: Sequence[str]
    recipes: Sequence[str] = ("",)
    ways: Sequence[int] = (1,)
    depths: Sequence[int] = (0,)
    stages: Sequence[int] = (1,)

    def choices(self) -> Iterator[Choice]:
        every = product(self.places, self.schedules, self.recipes, self.ways, self.depths, self.stages)
        for place, schedule, recipe, ways, depth, stages in every:
            if ways * stages <= self.devices:
                yield Choice(place, schedule, recipe, ways, depth, stages)


def places(workers: int, machine: bool = False) -> list[str]:
    """One engine, and every placement that can be made of so many workers, in all sizes. `machine`: they would share
    one; so those are among them that only divide its cores."""
    found = []
    for verb, name, method in catalog.every():
        if verb != "place":
            continue
        if (sizes := method.sizes(workers)) is not None:
            found += [f"{name}:{knobs}" for knobs in sizes]
        elif machine or not method.traits.launches:
            found.append(name)
    return found


@dataclass(frozen=True)
class Tried:
    """A choice, and the highest rate at which it meets the targets. `worth`: of what is wanted, per device, joule or
    unit of money; more is better. `pruned`: it was not measured to the end, as it could not be the best."""

    choice: Choice
    devices: int
    rate: float
    worth: float
    pruned: bool = False


@dataclass(frozen=True)
class Question:
    """The load, targets and costs by which a choice is judged."""

    load: Load
    slo: SLO
    source: Callable[[Choice], CostsByRole]
    setting: ServerSetting
    goal: Goal = "goodput"
    precision: float = 0.02

    def scenario(self, choice: Choice, replicas: int = 1) -> Scenario:
        """Raises UserError for one that cannot be built."""
        drafts = replace(self.setting.drafts, depth=choice.depth)
        made = replace(self.setting, place=choice.place, schedule=choice.schedule, drafts=drafts)
        return made.scenario(self.source(choice), replicas, (), self.load.seed)

    def devices(self, choice: Choice) -> int:
        """The number of devices that such a server takes."""
        if self.source(choice).machine:
            return 1
        policy = self.scenario(choice).policy()
        return (1 if policy is None else len(policy.worker_specs())) * choice.ways * choice.stages

    def at(self, choice: Choice, rate: float) -> LoadOutcome:
        return run(self.scenario(choice), self.load.jobs(self.slo, rate))

    def goodput(self, scenario: Scenario, guess: float) -> Best:
        """The highest rate, looked for around a guess; 0: anywhere."""
        load = replace(self.load, rate=guess or self.load.rate)
        return goodput(scenario, load, self.slo, precision=self.precision)

    def worth(self, choice: Choice, rate: float, devices: int) -> float:
        """Requests in time per second and device, per joule, or per unit of money."""
        if self.goal == "goodput" or not rate:
            return rate / devices
        found = self.at(choice, rate)
        numbers = found.numbers(self.slo)
        spent = numbers["joules" if self.goal == "power" else "money"]
        if not spent:
            raise UserError(f"goal={self.goal!r}: these costs have no figures for it; choose a device that has")
        return len(found.jobs) * found.share(self.slo) / float(spent)


def search(
    space: SearchSpace, question: Question, tell: Callable[[int], object] = lambda done: None, prune: bool = True
) -> list[Tried]:
    """All choices, the best first. With `prune`, one that fails at the rate per device of the second best so far is not
    measured further (as shares fall with the rate, it can be neither winner nor runner-up); the first two are the same.

    Raises UserError where nothing can be built, and, naming the nearest that can be met, where no rate is low enough.
    """
    found: list[Tried] = []
    refused: list[str] = []
    second = 0.0
    for number, choice in enumerate(space.choices()):
        try:
            one = _tried(choice, space, question, second if prune and question.goal == "goodput" else 0.0)
        except TooShort:
            raise
        except UserError as error:
            refused.append(f"{choice}: {error}")
            one = None
        if one is not None:
            found.append(one)
            second = sorted((0.0, 0.0, *(each.worth for each in found if not each.pruned)))[-2]
        tell(number + 1)
    if not found:
        raise UserError(
            f"nothing can be built of {space.devices} devices: {refused[0] if refused else 'no choice fits'}"
        )
    if not any(one.worth for one in found):
        raise UserError(impossible([one.choice for one in found], question))
    return sorted(found, key=lambda one: (one.pruned, -one.worth, one.devices, str(one.choice)))


def _tried(choice: Choice, space: SearchSpace, question: Question, best: float) -> Tried | None:
    """None if it needs more devices than there are."""
    scenario = question.scenario(choice)
    devices = question.devices(choice)
    if devices > space.devices:
        return None
    if best:
        rate = best * devices
        if question.at(choice, rate).share(question.slo) < SHARE:
            return Tried(choice, devices, rate, best, pruned=True)
    found = question.goodput(scenario, best * devices)
    if not found.bounded:
        raise TooShort(f"all {question.load.requests} requests at once are in time: ask for more (--requests)")
    return Tried(choice, devices, found.rate, question.worth(choice, found.rate, devices))


def impossible(choices: Sequence[Choice], question: Question) -> str:
    """Why no rate is low enough, and the nearest targets that could be met."""
    nearest: tuple[float, str] | None = None
    slo = question.slo
    for choice in choices:
        outcome = question.at(choice, TRICKLE)
        numbers = outcome.numbers(slo)
        seen = {"ttft": numbers["ttft_p90_s"], "tpot": numbers["tpot_p90_s"]}
        tails = [tail for job in outcome.jobs if (tail := percentile(job.tbt, TAIL)) is not None]
        seen["p99 tbt"] = percentile(tails, SHARE)
        targets = {"ttft": slo.ttft, "tpot": slo.tpot, "p99 tbt": slo.tbt}
        over = max(((seen[k] or 0.0) / target for k, target in targets.items() if target), default=math.inf)
        if nearest is None or over < nearest[0]:
            said = ", ".join(f"{k.upper()} {1e3 * seen[k]:.3g} ms" for k in targets if targets[k] and seen[k])
            nearest = (over, f"{choice} has {said} for 90 % of its requests when each is alone")
    assert nearest is not None
    return f"these targets are missed at any rate; the nearest: {nearest[1]}"


def runner_up(found: Sequence[Tried]) -> Tried | None:
    """The best of another placement than the winner's, of those that were measured to the end; else the next best."""
    whole = [one for one in found[1:] if not one.pruned]
    return next((one for one in whole if one.choice.place != found[0].choice.place), next(iter(whole), None))


@dataclass(frozen=True)
class Assumption:
    """A changed assumption, and the question under it."""

    name: str
    question: Question


def sensitivity(winner: Tried, other: Tried | None, assumptions: Sequence[Assumption]) -> list[tuple[str, float, bool]]:
    """(assumption, the winner's worth then, over what it was; whether the runner-up would be the better one)."""
    found = []
    for each in assumptions:
        mine, theirs = (None if one is None else _again(one, each.question) for one in (winner, other))
        assert mine is not None
        found.append((each.name, mine / winner.worth, theirs is not None and theirs > mine))
    return found


def _again(one: Tried, question: Question) -> float:
    rate = question.goodput(question.scenario(one.choice), one.rate).rate
    return question.worth(one.choice, rate, one.devices)


def replicas(winner: Tried, devices: int, rate: float | None) -> int:
    """Returns the number of such servers: as many as a rate needs, or as devices there are. Raises UserError where
    there are too few devices."""
    most = devices // winner.devices
    if rate is None:
        return most
    need = math.ceil(rate / winner.rate)
    if need > most:
        raise UserError(f"{rate:g} requests/s need {need * winner.devices} devices ({need} times {winner.choice}), and "
                        f"there are {devices}: they carry {most * winner.rate:.3g} requests/s")  # fmt: skip
    return need
