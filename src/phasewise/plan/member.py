"""A worker in virtual time as the router's policies see it: the router's own handle over a station."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

from phasewise.cluster.handle import WorkerHandle
from phasewise.cluster.launcher import Message, WorkerSpec
from phasewise.kv.pool import Account
from phasewise.plan.job import Job
from phasewise.plan.station import Station


class Silent:
    """A connection on which nothing is said: what a station does is known at once."""

    def __init__(self, name: str) -> None:
        self.name, self.alive = name, True

    def tell(self, command: Message) -> None:
        raise AssertionError("stations are not told anything: see Cluster")

    def hear(self) -> list[Message]:
        return []

    def kill(self) -> None:
        self.alive = False


class Live(Mapping[str, Any]):
    """What a worker says of itself, up to date whenever it is read."""

    def __init__(self, member: Member) -> None:
        self._member = member

    def __getitem__(self, name: str) -> Any:
        station, member = self._member.station, self._member
        if name == "running":
            return len(station.running)
        if name == "waiting":
            return station.waiting
        if name == "arrivals":
            return member.arrivals
        if name == "free":
            store = station.store
            return store.ledger.free + member.kept + (store.prefixes.bytes if store.tree is not None else 0)
        if name == "wish":
            ledger = station.store.ledger
            return ledger.wish if isinstance(ledger, Account) else 0
        if name == "prefix_bytes":
            return station.store.prefixes.bytes
        if name == "counters":
            return {"steps": station.counters.steps}
        if name == "heard":
            return 0
        raise KeyError(name)

    def get(self, name: str, default: Any = None) -> Any:
        """Policies of many workers ask often, and every name is there."""
        return self[name]

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[str]:
        return iter(("running", "waiting", "arrivals", "free", "wish", "prefix_bytes", "counters", "heard"))


class Member:
    """One worker. `arrivals` wait to be taken over at the end of its step; `kept` bytes are set aside for what is on
    its way. `out` and `into`: when its link is free again. `ready`: no longer starting. `stepping`: within a step."""

    def __init__(self, name: str, spec: WorkerSpec, station: Station, now: float) -> None:
        self.spec, self.station = spec, station
        self.handle = WorkerHandle(Silent(name), spec, now)
        self.handle.state = cast("dict[str, Any]", Live(self))
        self.cores = spec.cores
        self.arrivals: list[Flight] = []
        self.kept = 0
        self.out = self.into = now
        self.decodes = spec.decodes
        self.ready = self.alive = True
        self.stepping = False


@dataclass(eq=False, slots=True)
class Flight:
    """A job on its way through the workers: at `member`, and then at `target`. `weight`: prompt tokens it was given
    with; `done` says that they are computed. `until`: when all that was sent of its KV is there."""

    job: Job
    member: Member
    weight: int
    target: Member | None = None
    pushed: bool = False
    done: bool = False
    paired: bool = False  # its target counts on it ...
    room: int = 0  # ... and keeps so many bytes for it
    until: float = 0.0
    sent: float = 0.0  # bytes

    @property
    def departs(self) -> bool:
        """Whether it leaves its worker when its prompt is done."""
        return self.pushed or not self.member.decodes

    @property
    def goes_on(self) -> Member | None:
        return self.target if self.pushed or not self.member.decodes else self.member
