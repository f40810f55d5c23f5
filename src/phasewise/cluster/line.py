"""The line between the router and one worker: commands go out, events come back, in order, until the worker dies.

Both are plain data (JSON carries them); tensors travel through a depot and are named by parcels. Workers of a crew
may run inside the router's own thread (here), in processes of their own (process.py) or on other machines (ray.py).
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, cast

from phasewise.cluster.depot import Depot, Shelf
from phasewise.cluster.lend import Lending
from phasewise.cluster.pool import Pool
from phasewise.cluster.worker import Worker

if TYPE_CHECKING:
    from phasewise.place import Plan

Message = dict[str, Any]


@dataclass(frozen=True)
class Spec:
    """What a worker is: the phases its engine runs, its share of the KV budget, its cores (None = any) and threads
    (None = one per core). `pooled`: all such workers share the whole budget, and lend KV instead of sending it; those
    that compute prompts only make way for the others."""

    role: str
    phases: tuple[str, ...]
    share: float
    cores: tuple[int, ...] | None = None
    threads: int | None = None
    pooled: bool = False

    @property
    def yields(self) -> bool:
        return len(self.phases) == 1

    @classmethod
    def of(cls, plain: Message) -> Spec:
        """The spec of `asdict`, which may have travelled as JSON."""
        known: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in plain.items()}
        return cls(**known)


class Line(Protocol):
    """A worker as the router sees it."""

    name: str

    @property
    def alive(self) -> bool:
        """False once the worker is known to be dead. What it said before may still be heard."""
        ...

    def tell(self, command: Message) -> None:
        """Send a command. Never blocks; what a dead worker is told is lost."""
        ...

    def hear(self) -> list[Message]:
        """The events that have come since. Never blocks."""
        ...

    def kill(self) -> None:
        """End the worker at once, whatever it does."""
        ...


class Crew(Protocol):
    """Hires workers, and waits for what they say."""

    @property
    def depot(self) -> Depot: ...

    def reserve(self, specs: Sequence[Spec]) -> None:
        """What will be hired first, and kept up: said once, before, so that hosts can be chosen for all together."""
        ...

    def hire(self, name: str, spec: Spec) -> Line:
        """A new worker. Names are never used twice."""
        ...

    def wait(self, lines: Sequence[Line], seconds: float) -> None:
        """Return when one of the lines has events or died, or after `seconds`."""
        ...

    def close(self) -> None:
        """Dismiss everybody and free what they left."""
        ...


class Here:
    """A line to a worker in this thread: it obeys at once, and takes its turn when its crew waits."""

    def __init__(self, name: str, worker: Worker, said: deque[str]) -> None:
        self.name, self.worker = name, worker
        self.alive = True
        self._said = said

    def tell(self, command: Message) -> None:
        if self.alive:
            self.worker.obey(json.loads(json.dumps(command)))

    def hear(self) -> list[Message]:
        heard: list[Message] = [json.loads(text) for text in self._said]
        self._said.clear()
        return heard or [{"event": "alive"}] * self.alive

    def kill(self) -> None:
        self.alive = False


class Inline:
    """A crew within one thread: every worker takes a turn per step of the router. The twin of all others."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._shelf = Shelf()
        self._pool: Pool | None = None

    @property
    def depot(self) -> Depot:
        return self._shelf if self._pool is None else Lending(self._shelf, self._pool)

    def reserve(self, specs: Sequence[Spec]) -> None:
        pass

    def hire(self, name: str, spec: Spec) -> Here:
        said: deque[str] = deque()
        account, depot = None, cast(Depot, self._shelf.at(name))
        if spec.pooled:
            self._pool = self._pool or Pool.here(self._plan.budget)
            account, depot = self._pool.account(name, spec.yields), Lending(depot, self._pool)
        engine = self._plan.engine(spec.phases, spec.share, account)
        return Here(name, Worker(engine, depot, lambda event: said.append(json.dumps(event))), said)

    def wait(self, lines: Sequence[Line], seconds: float) -> None:
        for line in lines:
            if isinstance(line, Here) and line.alive:
                line.worker.turn()

    def close(self) -> None:
        pass
