"""Which servers to build from so many devices: placements, pool sizes, schedules, degrees and recipes, tried in the
simulator (DistServe's search, arXiv 2401.09670, with whole requests judged by both targets)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Literal, Protocol, TypeAlias, cast

from phasewise import catalog
from phasewise.bench.goodput import SHARE
from phasewise.bench.latency import TAIL, percentile
from phasewise.errors import UserError
from phasewise.plan import side_by_side
from phasewise.plan.arrivals import Load
from phasewise.plan.layout import Affinity, Layout, fits
from phasewise.plan.sequence import SimulatedRequest
from phasewise.plan.setting import CostsByRole, ServerSetting
from phasewise.plan.simulate import (
    LEAST,
    MOST,
    Best,
    LoadOutcome,
    Scenario,
    highest,
    rate_from,
    reaches,
    run,
    within,
)
from phasewise.plan.slowdown import Slowdowns
from phasewise.request.params import SLO

Goal = Literal["goodput", "cost", "power", "price", "watts", "iso-cost", "iso-power"]
PRICED, POWERED = ("price", "iso-cost"), ("watts", "iso-power")  # goals by what devices cost, $/h, and take, W
ISO = ("iso-cost", "iso-power")  # the rate of as many servers as a budget has room for
BY_WEIGHT = ("goodput", *PRICED, *POWERED)  # goals that divide the rate by what a server has, whatever it does
NOTHING_KNOWN: Mapping[float, bool] = {}
Buildable: TypeAlias = "tuple[Choice, int]"  # and the number of devices that it takes
SHORT, COARSE = 8, 0.1  # the part of the load by which choices are put in order, and how precisely they are measured
FEWEST, FEW = 50, 8  # requests of such a part, and choices of which none is worth the trouble
TRICKLE = 1e-3  # requests/s at which nobody waits for anybody


class Tell(Protocol):
    """Hears how many choices are done, and of the best so far."""

    def __call__(self, done: int, note: str = "") -> object: ...


class TooShort(UserError):
    """The load ends before anybody has to wait: it says nothing of a rate."""


@dataclass(frozen=True)
class Choice:
    """One kind of server: `ways` devices share every layer of each of its workers, whose layers are divided among
    `stages` such groups; `depth`: guesses of a decode. `roles`: of workers whose degrees, or devices, are others."""

    place: str
    schedule: str
    recipe: str = ""
    ways: int = 1
    depth: int = 0
    stages: int = 1
    roles: tuple[Layout, ...] = ()

    def __str__(self) -> str:
        words = [self.place, self.schedule, *map(str, self.roles)]
        words += [f"recipe {self.recipe}"] if self.recipe else []
        words += [f"{self.ways} devices per {'stage' if self.stages > 1 else 'worker'}"] if self.ways > 1 else []
        words += [f"{self.stages} stages"] if self.stages > 1 else []
        words += [f"{self.depth} guess{'es' if self.depth > 1 else ''} a step"] if self.depth else []
        return ", ".join(words)


@dataclass(frozen=True)
class SearchSpace:
    """The search space: every combination whose server has no more than `devices` devices.

    With `layouts`, each role of a placement has one of its own: those named for the role, or else those for all (role
    ""). Otherwise all roles have the same of `ways` and `stages`. A node has `node` devices (0: all are on one), and
    with low `affinity` KV does not leave it.
    """

    devices: int
    places: Sequence[str]
    schedules: Sequence[str]
    recipes: Sequence[str] = ("",)
    ways: Sequence[int] = (1,)
    depths: Sequence[int] = (0,)
    stages: Sequence[int] = (1,)
    layouts: Sequence[Layout] = ()
    node: int = 0
    affinity: Affinity = "high"

    def choices(self) -> Iterator[Choice]:
        if self.layouts:
            for place in self.places:
                for roles in self._layouts(workers(place)):
                    for schedule, recipe, depth in product(self.schedules, self.recipes, self.depths):
                        yield Choice(place, schedule, recipe, 1, depth, 1, roles)
            return
        every = product(self.places, self.schedules, self.recipes, self.ways, self.depths, self.stages)
        for place, schedule, recipe, ways, depth, stages in every:
            if ways * stages <= self.devices and self._fits([Layout("", ways, stages)], place):
                yield Choice(place, schedule, recipe, ways, depth, stages)

    def _fits(self, alike: Sequence[Layout], place: str) -> bool:
        """Whether workers that are all alike have a place on nodes."""
        return not self.node or fits([*alike] * len(workers(place)), self.node, self.affinity)

    def _layouts(self, roles: Sequence[str]) -> Iterator[tuple[Layout, ...]]:
        """The layouts of a placement's roles that fit the devices and nodes there are."""
        names = list(dict.fromkeys(roles))
        options = []
        for name in names:
            own = [one for one in self.layouts if one.role == name]
            options.append(own or [replace(one, role=name) for one in self.layouts if not one.role])
        for found in product(*options):
            by = dict(zip(names, found))
            every = [by[role] for role in roles]
            if sum(one.devices for one in every) <= self.devices and fits(every, self.node, self.affinity):
                yield found


class Space(Protocol):
    """What a search goes through."""

    @property
    def devices(self) -> int: ...
    def choices(self) -> Iterator[Choice]: ...


@dataclass(frozen=True)
class Joined:
    """Several search spaces, one after the other."""

    spaces: Sequence[SearchSpace]

    @property
    def devices(self) -> int:
        return max(space.devices for space in self.spaces)

    def choices(self) -> Iterator[Choice]:
        return (choice for space in self.spaces for choice in space.choices())


def joined(spaces: Sequence[SearchSpace]) -> Space:
    return spaces[0] if len(spaces) == 1 else Joined(spaces)


def workers(place: str) -> list[str]:
    """The role of each worker of a placement; "all" is an engine's that does everything. Raises UserError."""
    policy = catalog.build("place", place).policy(0.0, range(2))
    return ["all"] if policy is None else [spec.role for spec in policy.worker_specs()]


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
    budget: float = math.inf  # the most that all devices may weigh, in $/h or W
    slowdowns: Slowdowns | None = None  # instead of `slo`

    def __post_init__(self) -> None:
        if self.goal in ISO and self.budget == math.inf:
            raise UserError(f"goal={self.goal!r} compares what a budget buys: say --budget, in $/h or W")

    def scenario(self, choice: Choice, replicas: int = 1) -> Scenario:
        """Raises UserError for one that cannot be built."""
        drafts = replace(self.setting.drafts, depth=choice.depth)
        made = replace(self.setting, place=choice.place, schedule=choice.schedule, drafts=drafts)
        return made.scenario(self.source(choice), replicas, (), self.load.seed)

    def devices(self, choice: Choice) -> int:
        """The number of devices that such a server takes. Raises UserError for one that cannot be built."""
        source = self.source(choice)
        return 1 if source.machine else sum(map(source.devices, self._workers(choice)))

    def _workers(self, choice: Choice) -> list[str]:
        policy = self.scenario(choice).policy()
        return ["all"] if policy is None else [spec.role for spec in policy.worker_specs()]

    def weight(self, choice: Choice, devices: int) -> float:
        """What the rate of such a server is divided by: its devices, their price in $/h, or their full power in W; the
        part of the budget that it takes, where servers are whole. Raises UserError where the devices do not say."""
        if self.goal in ISO:
            return 1.0 / max(1, self.copies(choice, devices))
        return self.spent(choice, devices)

    def copies(self, choice: Choice, devices: int) -> int:
        """The number of such servers that the budget has room for."""
        return math.floor(self.budget / self.spent(choice, devices) + 1e-9)

    def spent(self, choice: Choice, devices: int) -> float:
        """The devices of such a server, their price in $/h, or their full power in W."""
        if self.goal not in (*PRICED, *POWERED):
            return float(devices)
        source = self.source(choice)
        found = sum(map(source.price if self.goal in PRICED else source.power, self._workers(choice)))
        if not found:
            raise UserError(f"goal={self.goal!r}: these devices have no figures for it; choose devices that have")
        return found

    def at(self, choice: Choice, rate: float) -> LoadOutcome:
        return run(self.scenario(choice), self.load.jobs(self.slo, rate))

    def holds(self, scenario: Scenario, rate: float) -> bool:
        """Whether a share of `bench.goodput.SHARE` meets the targets at this rate, or all limits of slow-downs hold."""
        return self._holds(scenario, self.load.jobs(self.slo, rate))

    def _holds(self, scenario: Scenario, jobs: Sequence[SimulatedRequest]) -> bool:
        if self.slowdowns is not None:
            return within(scenario, jobs, self.slowdowns)
        return reaches(scenario, jobs, self.slo, SHARE)

    def at_once(self, scenario: Scenario) -> float:
        """About the requests/s that are served when all come at once, if targets are met even then; otherwise 0."""
        jobs = self.load.jobs(self.slo, MOST)
        if not self._holds(scenario, jobs):
            return 0.0
        return len(jobs) / max(job.last_token for job in jobs if job.last_token is not None)

    def goodput(self, scenario: Scenario, guess: float, known: Mapping[float, bool] = NOTHING_KNOWN) -> Best:
        """The highest rate, looked for around a guess; 0: anywhere. `known`: whether rates hold that were simulated."""

        def at(rate: float) -> float:
            return known[rate] if rate in known else self.holds(scenario, rate)

        return highest(at, True, guess or self.load.rate or 1.0, self.precision)

    def worth(self, choice: Choice, rate: float, devices: int) -> float:
        """Requests in time per second and device, $/h or W; or per joule, or unit of money, while devices are busy."""
        if self.goal in BY_WEIGHT or not rate:
            return rate / self.weight(choice, devices)
        found = self.at(choice, rate)
        numbers = found.numbers(self.slo)
        spent = numbers["joules" if self.goal == "power" else "money"]
        if not spent:
            raise UserError(f"goal={self.goal!r}: these costs have no figures for it; choose a device that has")
        return len(found.jobs) * found.share(self.slo) / float(spent)


def search(
    space: Space,
    question: Question,
    tell: Tell = lambda done, note="": None,
    prune: bool = True,
    processes: int = 1,
) -> list[Tried]:
    """All choices, the best first, tried on so many cores.

    With `prune`, a choice that fails at the rate per device of the second best so far is not measured further: as
    shares fall with the rate, it can be neither winner nor runner-up. So the first two are those of the exhaustive
    search. That good ones come first, all are tried on a short load before. `tell` hears how many are done, and of the
    best so far; none is done while a short load is tried.

    Raises UserError where nothing can be built, and, naming the nearest that can be met, where no rate is low enough.
    """
    every, refused = _buildable(space, question)
    if not every:
        raise UserError(f"nothing can be built of {space.devices} devices: {refused or 'no choice fits'}")
    prune = prune and question.goal in BY_WEIGHT
    if prune and question.load.requests >= SHORT * FEWEST and len(every) > FEW:
        every, rate = _promising(every, question, processes, tell)
        question = replace(question, load=replace(question.load, rate=rate))  # where bisection begins
    found = _each(every, question, prune, processes, tell)
    if not any(one.worth for one in found):
        raise UserError(impossible([one.choice for one in found], question))
    return sorted(found, key=lambda one: (one.pruned, -one.worth, one.devices, str(one.choice)))


def _buildable(space: Space, question: Question) -> tuple[list[Buildable], str]:
    """The choices that can be built of the devices there are; and why the first of the others cannot."""
    found, refused = list[Buildable](), ""
    for choice in space.choices():
        try:
            devices = question.devices(choice)
        except UserError as error:
            refused = refused or f"{choice}: {error}"
            continue
        if devices <= space.devices and question.spent(choice, devices) <= question.budget:
            found.append((choice, devices))
    return found, refused


def _promising(every: list[Buildable], question: Question, processes: int, tell: Tell) -> tuple[list[Buildable], float]:
    """The same choices in the order of what they carry of the load's first requests. Those that serve them in time even
    all at once come first, in the order of how fast that is. And about the rate that the first carries."""
    short = replace(question, load=replace(question.load, requests=question.load.requests // SHORT),
                    precision=max(COARSE, question.precision))  # fmt: skip

    def first(done: int, note: str = "") -> None:
        tell(0, f"{done} tried on a short load first")

    found = _each(every, short, True, processes, first, short=True)
    found.sort(key=lambda one: (one.pruned, -one.worth, -one.rate / question.weight(one.choice, one.devices)))
    return [(one.choice, one.devices) for one in found], found[0].rate or 1.0


def _each(
    every: Sequence[Buildable], question: Question, prune: bool, processes: int, tell: Tell, short: bool = False
) -> list[Tried]:
    """What becomes of each choice. `short`: of a load that may end too soon to tell."""
    found: list[Tried] = []

    def second() -> float:
        """The worth of the second best so far, which a choice has to reach; what a short load cannot tell aside."""
        known = (each.worth for each in found if not each.pruned and each.worth < math.inf)
        return sorted((0.0, 0.0, *known))[-2] if prune else 0.0

    def work(one: Buildable, best: float) -> Tried:
        return (short and _at_once(*one, question)) or _tried(*one, question, best)

    for place, one in side_by_side.each(every, work, second, processes):
        if isinstance(one, TooShort) and short:
            one = Tried(*every[place], 0.0, math.inf)
        if isinstance(one, Exception):
            raise one
        assert isinstance(one, Tried)
        found.append(one)
        best = max(found, key=lambda each: 0.0 if each.pruned else each.worth)
        tell(len(found), f"best so far: {best.choice}, {best.rate:.3g} requests/s of {best.devices} devices")
    return found


def _at_once(choice: Choice, devices: int, question: Question) -> Tried | None:
    """The choice at any rate, if it serves all requests at once in time; `rate` is how many it serves then."""
    rate = question.at_once(question.scenario(choice))
    return Tried(choice, devices, rate, math.inf) if rate else None


def _tried(choice: Choice, devices: int, question: Question, best: float) -> Tried:
    """The choice measured to the end, if it holds at the lowest rate of the search that is worth `best` at least."""
    scenario, rate, known = question.scenario(choice), 0.0, dict[float, bool]()
    if best:
        rate = rate_from(best * question.weight(choice, devices), question.precision)
        known[rate] = question.holds(scenario, rate)
        if not known[rate]:
            return Tried(choice, devices, rate, best, pruned=True)
    found = question.goodput(scenario, rate, known)
    if not found.bounded:
        raise TooShort(f"all {question.load.requests} requests at once are in time: ask for more (--requests)")
    return Tried(choice, devices, found.rate, question.worth(choice, found.rate, devices))


def impossible(choices: Sequence[Choice], question: Question) -> str:
    """Why no rate is low enough, and the nearest targets that could be met."""
    nearest: tuple[float, str] | None = None
    slo = question.slo
    for choice in choices:
        outcome = question.at(choice, TRICKLE)
        if question.slowdowns is not None:
            over = question.slowdowns.over(outcome.jobs)
            if nearest is None or over < nearest[0]:
                nearest = over, f"{choice} is {over:.3g} times beyond one of the limits when each request is alone"
            continue
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


def sensitivity(
    winner: Tried, other: Tried | None, assumptions: Sequence[Assumption], processes: int = 1
) -> list[tuple[str, float, bool]]:
    """(assumption, the winner's worth then, over what it was; whether the runner-up would be the better one)."""

    def work(each: Assumption, hint: None) -> tuple[float, bool]:
        mine = _again(winner, each.question)
        return mine, other is not None and _more(other, each.question, mine)

    found = list[tuple[str, float, bool]]()
    for place, one in sorted(side_by_side.each(assumptions, work, lambda: None, processes), key=lambda one: one[0]):
        if isinstance(one, Exception):
            raise one
        mine, changes = cast("tuple[float, bool]", one)
        found.append((assumptions[place].name, mine / winner.worth, changes))
    return found


def _again(one: Tried, question: Question) -> float:
    rate = question.goodput(question.scenario(one.choice), one.rate).rate
    return question.worth(one.choice, rate, one.devices)


def _more(one: Tried, question: Question, worth: float) -> bool:
    """Whether it is worth more than that: where rates count, whether it holds at the next rate that a search tries."""
    if question.goal not in BY_WEIGHT:
        return _again(one, question) > worth
    rate = max(LEAST, worth * question.weight(one.choice, one.devices)) * (1 + question.precision)
    return question.holds(question.scenario(one.choice), rate)


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
