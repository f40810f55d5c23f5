"""The workers there are: hired, heard of in time, replaced when they die."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from phasewise.cluster.desk import Desk
from phasewise.cluster.line import Crew, Message, Spec
from phasewise.errors import PhasewiseError
from phasewise.trace import Counters

log = logging.getLogger(__name__)
STILLBORN = 3  # workers of a role in a row that died without a word: hiring more is no use


@dataclass(frozen=True)
class Patience:
    """How long to wait, seconds."""

    move: float = 10.0  # for a word of a hand-off under way; then its prompt is computed again
    silence: float = 10.0  # for any word of a worker; then it is taken for dead
    start: float = 120.0  # for the first word of a new worker


class Unstaffed(PhasewiseError):
    """No worker of some role can be started."""


class Staff:
    """Desks of the workers hired from a crew, one for each spec at any time."""

    def __init__(self, crew: Crew, specs: Sequence[Spec], clock: Callable[[], float]) -> None:
        self.crew, self.clock = crew, clock
        self.desks: list[Desk] = []
        self.gone = Counters()  # what the dead had counted, and how many they are
        self._hired = 0
        self._stillborn: Counter[str] = Counter()  # in a row, by role
        crew.reserve(specs)
        for spec in specs:
            self.hire(spec)

    @property
    def ready(self) -> bool:
        """Whether everybody has said a first word."""
        return all(desk.state for desk in self.desks)

    @property
    def seated(self) -> list[Desk]:
        """Who can work at once. Where a role has only workers that are starting, these."""
        there = {desk.role for desk in self.desks if desk.state}
        return [desk for desk in self.desks if desk.state or desk.role not in there]

    @property
    def counters(self) -> Counters:
        """Work done by everybody who ever was here, as far as they have reported."""
        return sum((Counters(**desk.state["counters"]) for desk in self.desks if desk.state), self.gone)

    def hire(self, spec: Spec) -> Desk:
        desk = Desk(self.crew.hire(f"{spec.role}-{self._hired}", spec), spec, self.clock())
        self._hired += 1
        self.desks.append(desk)
        return desk

    def wait(self, seconds: float) -> None:
        """Return when somebody has said something or died, or after `seconds`."""
        self.crew.wait([desk.line for desk in self.desks], seconds)

    def hear(self, desk: Desk) -> Iterator[Message]:
        """What a worker says of requests; what it says of itself is noted."""
        for event in desk.line.hear():
            desk.heard_at = self.clock()
            if event["event"] == "state":
                if not desk.state:
                    self._stillborn[desk.role] = 0
                desk.state = event
            elif event["event"] != "alive":
                yield event

    def dead(self, patience: Patience) -> Iterator[tuple[Desk, str]]:
        """Those that died or say nothing any more, each killed but not replaced yet, and why. Hear their last words."""
        now = self.clock()
        for desk in list(self.desks):
            silent = now - desk.heard_at
            if not desk.line.alive:
                why = "it died"
            elif silent > (patience.silence if desk.state else patience.start):
                why = f"it said nothing for {silent:.1f} s"
            else:
                continue
            desk.line.kill()
            yield desk, why

    def replace(self, desk: Desk, why: str) -> None:
        """Somebody new for a dead worker's desk. Raises Unstaffed when they keep dying before their first word."""
        log.error("worker %s is lost: %s", desk.name, why)
        self.desks.remove(desk)
        self.gone.workers_lost += 1
        if desk.state:
            self.gone += Counters(**desk.state["counters"])
        else:
            self._stillborn[desk.role] += 1
            if self._stillborn[desk.role] >= STILLBORN:
                raise Unstaffed(
                    f"{STILLBORN} {desk.role} workers in a row could not start (at last: {why}): the log says why, and "
                    "--cluster inline does without processes"
                )
        self.hire(desk.spec)
