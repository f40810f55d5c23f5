"""Which recipe to serve, found on the model itself: successive halving (arXiv 1502.07943) on the clock, and on answers
for those that may change them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from phasewise.bench.rounds import interval, ratio
from phasewise.bench.settings import DEFAULT, BenchSetting, SettingTrial, middle
from phasewise.bench.workloads import Shot
from phasewise.errors import UserError
from phasewise.plan.candidates import changes_answers, pairs
from phasewise.plan.loss import Loss

FINALISTS = 4  # recipes that are measured in full
SEEDS = (0, 1)  # of the examples to choose by, and of those that are reported: others


@dataclass
class Candidate:
    """A recipe, and what is known of it by now. `speed`: times the default's, paired by round; `within`: 95 %."""

    setting: BenchSetting
    lossy: bool
    speed: float = 1.0
    within: tuple[float, float] | None = None
    kv_bytes: float | None = None  # live, of a request
    losses: list[Loss] = field(default_factory=list)
    out: str | None = None  # why it is no longer there

    @property
    def name(self) -> str:
        return self.setting.name

    @property
    def loss(self) -> float:
        """The largest upper end of its rows: what it may lose."""
        return max((loss.high for loss in self.losses), default=0.0)

    def refuted(self, limit: float) -> Loss | None:
        """A row that is certain to lose more than the limit."""
        return next((loss for loss in self.losses if loss.low > limit), None)

    def allowed(self, limit: float) -> bool:
        """No row's interval crosses the limit."""
        return not self.lossy or (bool(self.losses) and self.loss <= limit)


class Race(Protocol):
    """Settings against the default on the clock, as `bench.settings.Comparison` is."""

    @property
    def trials(self) -> Sequence[SettingTrial]: ...
    @property
    def refused(self) -> Mapping[str, str]: ...
    def run(self, rounds: int, shots: Callable[[int], list[Shot]]) -> Iterator[int]: ...


class Weigh(Protocol):
    """Losses of a recipe over so many examples, by a seed. Raises UserError."""

    def __call__(self, verbs: dict[str, str], examples: int, seed: int) -> list[Loss]: ...


@dataclass
class RungBudget:
    """Rounds and examples of the first rung; each further one has twice as many, for half of the candidates. `final`:
    those of what is reported."""

    rounds: int = 1
    examples: int = 8
    final: tuple[int, int] = (5, 50)


@dataclass
class Tuner:
    """`race` makes a race of settings against the default; `weigh` tells what they lose."""

    race: Callable[[Sequence[BenchSetting]], Race]
    shots: Callable[[int], list[Shot]]  # of a round; no prompt comes twice
    weigh: Weigh
    limit: float
    tell: Callable[[str], object] = lambda what: None
    candidates: dict[str, Candidate] = field(default_factory=dict)
    default: Candidate = field(default_factory=lambda: Candidate(BenchSetting(DEFAULT), lossy=False))
    _round: int = 0

    def run(self, settings: Sequence[BenchSetting], budget: RungBudget) -> list[Candidate]:
        """The finalists, the default among them, measured in full; the best that is allowed comes first.

        Raises UserError where the default itself cannot run.
        """
        alive = self._enter(settings)
        rounds, examples, paired = budget.rounds, budget.examples, False
        while len(alive) > FINALISTS or not paired:
            alive = self._rung(alive, rounds, examples)
            if not paired:
                alive += self._enter(pairs([one.setting for one in alive], [*map(_setting, self.candidates.values())]))
                paired = True
            rounds, examples = 2 * rounds, 2 * examples
        return self._final(alive, budget)

    # ---- inside
    def _enter(self, settings: Sequence[BenchSetting]) -> list[Candidate]:
        new = [
            Candidate(setting, changes_answers(setting)) for setting in settings if setting.name not in self.candidates
        ]
        self.candidates |= {one.name: one for one in new}
        return new

    def _rung(self, alive: list[Candidate], rounds: int, examples: int) -> list[Candidate]:
        """The faster half of those that are not refuted; exact ones compete on the clock alone."""
        self._clock(alive, rounds)
        ranked = sorted((one for one in alive if one.out is None), key=lambda one: -one.speed)
        kept: list[Candidate] = []
        for one in ranked:
            if len(kept) < max(FINALISTS, (len(ranked) + 1) // 2) and self._not_refuted(one, examples):
                kept.append(one)
            elif one.out is None:
                one.out = f"{one.speed:.2f} times the default's speed: others are faster"
        return kept

    def _not_refuted(self, one: Candidate, examples: int) -> bool:
        if one.lossy:
            self._weighed(one, examples, SEEDS[0])
        return one.out is None

    def _weighed(self, one: Candidate, examples: int, seed: int) -> None:
        self.tell(f"{one.name}: answers ({examples} examples)")
        try:
            one.losses = self.weigh(dict(one.setting.verbs), examples, seed)
        except UserError as error:
            one.out = str(error)
            return
        if (wrong := one.refuted(self.limit)) is not None:
            one.out = f"{wrong.task}: loses {wrong}"

    def _clock(self, some: Sequence[Candidate], rounds: int) -> None:
        run = self.race([one.setting for one in some])
        self.tell(f"{len(some)} recipes on the clock, {rounds} rounds")
        first = self._round
        for done in run.run(rounds, lambda number: self.shots(first + number)):
            self.tell(f"{len(some)} recipes on the clock: run {done} of {rounds * (1 + len(some))}")
        self._round += rounds
        _timed(self.default, run.trials)
        for one in some:
            if one.name in run.refused:
                one.out = run.refused[one.name]
            else:
                _timed(one, run.trials)

    def _final(self, alive: list[Candidate], budget: RungBudget) -> list[Candidate]:
        """On examples that nothing was chosen by."""
        rounds, examples = budget.final
        best = alive[:FINALISTS]
        for one in alive[FINALISTS:]:
            one.out = f"{one.speed:.2f} times the default's speed: others are faster"
        self._clock(best, rounds)
        for one in best:
            if one.lossy and one.out is None:
                self._weighed(one, examples, SEEDS[1])
        found = [one for one in best if one.out is None]
        return ranked([*found, self.default], self.limit)


def _setting(one: Candidate) -> BenchSetting:
    return one.setting


def _timed(one: Candidate, trials: Sequence[SettingTrial]) -> None:
    """Its speed over the default's in the same rounds, and what a request holds."""
    rows = [trial.numbers() for trial in trials]
    by = {name: {row["round"]: row["output_tokens_per_s"] for row in rows if row["setting"] == name}
          for name in (one.name, DEFAULT)}  # fmt: skip
    found = ratio(by[one.name], by[DEFAULT])
    assert found is not None
    one.speed, one.within = found.median, interval(by[one.name], by[DEFAULT])
    one.kv_bytes = middle([row for row in rows if row["setting"] == one.name], "live_bytes_per_request")


def ranked(found: Sequence[Candidate], limit: float) -> list[Candidate]:
    """Order the allowed first, the fastest before others; one that is not certainly faster than the default comes
    after it."""

    def key(one: Candidate) -> tuple[bool, bool, float]:
        surely = one.within is not None and one.within[0] > 1.0
        default = one.name == DEFAULT
        return not one.allowed(limit), not (surely or default), (-one.speed if surely else 0.0) if not default else 0.0

    return sorted(found, key=key)


def front(found: Sequence[Candidate]) -> set[str]:
    """Names of those that no other one beats in speed, loss and KV bytes at once."""

    def beats(a: Candidate, b: Candidate) -> bool:
        mine, theirs = (_worth(one) for one in (a, b))
        return mine != theirs and all(x <= y for x, y in zip(mine, theirs))

    return {one.name for one in found if not any(beats(other, one) for other in found)}


def _worth(one: Candidate) -> tuple[float, float, float]:
    """Less is better."""
    return -one.speed, max((loss.mean for loss in one.losses), default=0.0), one.kv_bytes or 0.0
