"""Supervision of workers: they are launched, heard, and replaced when they die or are silent too long."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from phasewise.child import Message
from phasewise.cluster.handle import WorkerHandle
from phasewise.cluster.launcher import Launcher, WorkerSpec
from phasewise.errors import PhasewiseError
from phasewise.request.counters import Counters

log = logging.getLogger(__name__)
STILLBORN = 3  # workers of a role in a row that died without a word: launching more is no use


@dataclass(frozen=True)
class Timeouts:
    """Seconds to wait before something is taken for lost."""

    handoff: float = 10.0  # for a word of a hand-off under way; then its prompt is computed again
    silence: float = 10.0  # for any word of a worker; then it is taken for dead
    start: float = 120.0  # for the first word of a new worker


class NoWorkers(PhasewiseError):
    """No worker of some role can be started."""


class Supervisor:
    """Handles of the workers started by a launcher, one for each spec at any time."""

    def __init__(self, launcher: Launcher, specs: Sequence[WorkerSpec], clock: Callable[[], float]) -> None:
        self.launcher, self.clock = launcher, clock
        self.handles: list[WorkerHandle] = []
        self.gone = Counters()  # what the dead had counted, and how many they are
        self._roles: dict[str, Counters] = {}  # of the dead ...
        self._recipes: dict[str, Counters] = {}  # ... and of their requests
        self._launched = 0
        self._stillborn: Counter[str] = Counter()  # in a row, by role
        launcher.reserve(specs)
        for spec in specs:
            self.launch(spec)

    @property
    def ready(self) -> bool:
        """Every worker has reported once."""
        return all(handle.state for handle in self.handles)

    @property
    def seated(self) -> list[WorkerHandle]:
        """The workers that can start at once; of a role whose workers are all starting, these."""
        if self.ready:
            return self.handles
        there = {handle.role for handle in self.handles if handle.state}
        return [handle for handle in self.handles if handle.state or handle.role not in there]

    @property
    def counters(self) -> Counters:
        """Work done by everybody who ever was here, as far as they have reported."""
        return sum((Counters(**handle.state["counters"]) for handle in self.handles if handle.state), self.gone)

    @property
    def by_role(self) -> dict[str, Counters]:
        """The same, by role."""
        found = dict(self._roles)
        for handle in self.handles:
            found[handle.role] = found.get(handle.role, Counters()) + Counters(**handle.state.get("counters", {}))
        return found

    @property
    def by_recipe(self) -> dict[str, Counters]:
        """The counters that belong to single requests, by their recipe."""
        found = dict(self._recipes)
        for handle in self.handles:
            _add(found, handle.state.get("by_recipe", {}))
        return found

    def launch(self, spec: WorkerSpec) -> WorkerHandle:
        handle = WorkerHandle(self.launcher.launch(f"{spec.role}-{self._launched}", spec), spec, self.clock())
        self._launched += 1
        self.handles.append(handle)
        return handle

    def wait(self, seconds: float) -> None:
        """Return when somebody has said something or died, or after `seconds`."""
        self.launcher.wait([handle.connection for handle in self.handles], seconds)

    def hear(self, handle: WorkerHandle) -> Iterator[Message]:
        """Yield a worker's events of requests, and note what it reports of itself."""
        events = handle.connection.hear()
        if events:
            handle.heard_at = self.clock()
        for event in events:
            if event["event"] == "state":
                if not handle.state:
                    self._stillborn[handle.role] = 0
                handle.state = event
            elif event["event"] != "alive":
                yield event

    def dead(self, handles: Sequence[WorkerHandle], timeouts: Timeouts) -> Iterator[tuple[WorkerHandle, str]]:
        """Yield the handles whose workers died or are silent, and why. Each is killed but not replaced yet: its last
        events may still be heard."""
        now = self.clock()
        for handle in handles:
            silent = now - handle.heard_at
            if not handle.connection.alive:
                why = "it died"
            elif silent > (timeouts.silence if handle.state else timeouts.start):
                why = f"it said nothing for {silent:.1f} s"
            else:
                continue
            handle.connection.kill()
            yield handle, why

    def replace(self, handle: WorkerHandle, why: str) -> WorkerHandle:
        """Launch a successor of a dead worker. Raises NoWorkers when they keep dying before they report."""
        log.error("worker %s is lost: %s", handle.name, why)
        self.handles.remove(handle)
        self.gone.workers_lost += 1
        if handle.state:
            self.gone += Counters(**handle.state["counters"])
            done = self._roles.get(handle.role, Counters())
            self._roles[handle.role] = done + Counters(**handle.state["counters"])
            _add(self._recipes, handle.state["by_recipe"])
        else:
            self._stillborn[handle.role] += 1
            if self._stillborn[handle.role] >= STILLBORN:
                raise NoWorkers(
                    f"{STILLBORN} {handle.role} workers in a row could not start (at last: {why}): the log says why, "
                    "and --cluster inline does without processes"
                )
        return self.launch(handle.spec)


def _add(found: dict[str, Counters], more: Mapping[str, Mapping[str, int]]) -> None:
    for recipe, counts in more.items():
        found[recipe] = found.get(recipe, Counters()) + Counters(**counts)
