"""Workers, links and failures in virtual time. Who does what is asked of the placement's own policy."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

from phasewise.cluster.launcher import WorkerSpec
from phasewise.cluster.load import has_room, may_keep
from phasewise.cluster.policy import Adjusting, Pairing, Policy
from phasewise.kv.buffer import Ledger, rounded
from phasewise.kv.pool import Account, Table
from phasewise.plan.beside import Beside
from phasewise.plan.cost import Cost
from phasewise.plan.job import Job
from phasewise.plan.member import Flight, Member
from phasewise.plan.memory import Held
from phasewise.plan.serving import Serving
from phasewise.plan.station import Engine, Station
from phasewise.plan.world import LOCAL, Link, World

ALONE = WorkerSpec("all", ("prefill", "decode"), 1.0)  # what runs where there is no policy


@dataclass(frozen=True)
class Layout:
    """What a cluster is made of. `cost` is that of a role with so many threads (None: all there are), `budget` the
    bytes of KV of a worker; `revive`: seconds until a dead worker's successor is there; `beside`: how workers of so
    many threads slow each other down, `shared`: on the same cores; `served`: what a server adds to steps."""

    engine: Engine
    cost: Callable[[str, int | None], Cost]
    budget: Callable[[WorkerSpec], int]
    link: Link = LOCAL
    revive: float = 1.0
    beside: Callable[[int | None], Beside] = lambda threads: {}
    shared: Callable[[int | None], Beside] = lambda threads: {}
    served: Serving = field(default_factory=Serving)


class Cluster:
    """A placement in virtual time. `over` is told of each request that leaves."""

    def __init__(self, world: World, layout: Layout, policy: Policy | None, over: Callable[[Job], object]) -> None:
        self.world, self.layout, self.policy, self.over = world, layout, policy, over
        self._pairing = policy if isinstance(policy, Pairing) and policy.push else None
        self._adjusting = policy if isinstance(policy, Adjusting) else None
        self.flights: dict[str, Flight] = {}
        self.offered: list[Flight] = []  # prompts that are done and wait for a worker with room, by arrival
        self.restarts = self.lost = self.unmet = self.handoffs = 0
        self.sent_bytes = 0.0
        self.handoff_seconds: list[float] = []
        self.retired: list[Station] = []
        self._launched = 0
        specs = [ALONE] if policy is None else policy.worker_specs()
        pooled = [spec for spec in specs if spec.pooled]
        self._table = Table.here(layout.budget(pooled[0])) if pooled else None
        self.members = [self._launch(spec) for spec in specs]

    def _launch(self, spec: WorkerSpec) -> Member:
        name = f"{spec.role}-{self._launched}"
        self._launched += 1
        ledger: Ledger
        if self._table is not None and spec.pooled:
            ledger = Account(self._table, name, Ledger(0).memory, spec.yields)
        else:
            ledger = Ledger(self.layout.budget(spec))
        threads = len(spec.cores) if spec.cores is not None else spec.threads
        station = Station(self.layout.engine, self.layout.cost(spec.role, threads), ledger, not spec.decodes)
        station.served = self.layout.served
        self._beside(station, threads)
        return Member(name, spec, station, self.world.now)

    def _beside(self, station: Station, threads: int | None) -> None:
        station.beside, station.shared = self.layout.beside(threads), self.layout.shared(threads)

    @property
    def stations(self) -> list[Station]:
        """Of all workers that ever were."""
        return [*self.retired, *(member.station for member in self.members)]

    # ---- starting
    def add(self, job: Job) -> None:
        """A request arrives."""
        member = self._start_of(job)
        flight = self.flights[job.id] = Flight(job, member, job.known)
        if self._pairing is not None and not job.n_out:
            self._meet(flight, self._pairing)
        job.departs = flight.pushed
        if not member.station.add(job):
            job.left = "failed"
            self._unpair(flight)
            del self.flights[job.id]
            self.over(job)
            return
        member.handle.prefilling += flight.weight
        if flight.goes_on is not None:
            flight.goes_on.handle.decoding += job.known
        if self.layout.engine.prefix_cache and self.policy is not None:
            member.handle.remember(job.tokens)
        self._wake(member)

    def _start_of(self, job: Job) -> Member:
        if self.policy is None:
            return self.members[0]
        roles = {member.spec.role for member in self.members if member.ready}
        seated = [member for member in self.members if member.ready or member.spec.role not in roles]
        if not job.n_out:
            handle = self.policy.start(job.tokens, [member.handle for member in seated])
        else:
            found = self.policy.go_on(job.known, [member.handle for member in seated if member.spec.decodes])
            assert found is not None
            handle = found
        return next(member for member in seated if member.handle is handle)

    def _meet(self, flight: Flight, policy: Pairing) -> None:
        """Choose who goes on with a request before its prompt is computed; room is kept there."""
        job = flight.job
        room = flight.member.station.store.cost(job.known + 1)
        views = []
        if not self.offered:
            for member in self.members:
                station = member.station
                if member.ready and member.decodes and may_keep(member.handle, station, station.waiting, room):
                    views.append(member.handle)
        handle = policy.meet(job.tokens, flight.member.handle, views)
        if handle is None:
            self.unmet += 1
        elif handle is not flight.member.handle:
            target = next(member for member in self.members if member.handle is handle)
            if target.station.room.promise(room):
                flight.target, flight.pushed, flight.room, flight.paired = target, True, room, True
                target.kept += room
                target.handle.promised += room
                target.handle.coming += 1
            else:
                self.unmet += 1

    # ---- steps
    def _wake(self, member: Member) -> None:
        """Let a worker go on, unless it is within a step."""
        if member.stepping or not member.ready:
            return
        self._land(member)
        station = member.station
        if station.beside or member.cores is not None:
            self._look_round(member)
        begun = station.begin(self.world.now)
        for job in station.out:  # found no room
            self._leave(self.flights[job.id])
        if begun is not None:
            member.stepping = True
            following, over = begun
            if following < over:
                self.world.at(following, self._next, member)
            self.world.at(over, self._finish, member)

    def _next(self, member: Member) -> None:
        """Its first stage is free, while later ones are not."""
        if member.alive:
            member.stepping = False
            self._wake(member)

    def _finish(self, member: Member) -> None:
        if not member.alive:
            return
        station, now = member.station, self.world.now
        member.stepping = station.free[0] > now
        if self._pairing is not None and station.under_way[0].prompts:
            self._send(member)
        left = False
        progressed = station.finish(now)
        for job in progressed:
            flight = self.flights[job.id]
            if not flight.done:
                flight.done = True
                member.handle.prefilling -= flight.weight
            goes_on = flight.goes_on
            if goes_on is not None:
                goes_on.handle.decoding += job.gained
            if job.left is not None:
                left = True
                self._leave(flight)
            elif flight.departs and flight.member is member and job in station.departed:
                self._set_out(flight)
        if isinstance(station.store.ledger, Account):
            station.store.ledger.settle(0 if member.spec.yields else station.growth)
        if self.offered and (left or progressed):
            self._hand_over()
        if self._adjusting is not None:
            self._adjust(self._adjusting, progressed)
        self._wake(member)
        if member.spec.pooled:  # what it gave back, others may have waited for
            for other in self.members:
                self._wake(other)

    def _leave(self, flight: Flight) -> None:
        job = flight.job
        del self.flights[job.id]
        if not flight.done:
            flight.member.handle.prefilling -= flight.weight
        if flight.goes_on is not None:
            flight.goes_on.handle.decoding -= job.known
        self._unpair(flight)
        if flight in self.offered:
            self.offered.remove(flight)
        self.over(job)

    def _unpair(self, flight: Flight) -> None:
        """Its target need no longer keep room."""
        target = flight.target
        if target is None or not flight.paired:
            return
        if flight.pushed:
            target.station.room.promise(-flight.room)
            target.kept -= flight.room
        target.handle.promised -= flight.room
        target.handle.coming -= 1
        flight.paired = False

    # ---- hand-offs
    def _send(self, member: Member) -> None:
        """What the step has computed of prompts that are pushed is on its way."""
        for work in member.station.under_way[0].works:
            flight = self.flights.get(work.job.id)
            if flight is None or not flight.pushed or flight.member is not member or not work.job.prefilling:
                continue
            layers = self.layout.engine.layers
            share = 1.0 if work.layers is None else (work.layers[1] - work.layers[0]) / layers
            found = work.job.computed if not flight.sent else 0  # of the prefix cache
            self._carry(flight, (work.rows + found) * share * self.layout.engine.row_bytes)

    def _carry(self, flight: Flight, n_bytes: float) -> None:
        """Bytes take the links of both workers, one transfer after the other."""
        assert flight.target is not None
        source, target = flight.member, flight.target
        begins = max(self.world.now, source.out, target.into)
        flight.until = source.out = target.into = begins + self.layout.link.seconds(n_bytes)
        flight.sent += n_bytes
        self.sent_bytes += n_bytes

    def _set_out(self, flight: Flight) -> None:
        """A prompt is done, and its request leaves."""
        flight.job.sent_at = self.world.now
        if flight.pushed:
            self.world.at(max(self.world.now, flight.until) + self.layout.link.latency, self._arrive, flight,
                          flight.job.attempt)  # fmt: skip
            return
        assert flight.job.kv is not None
        flight.member.station.room.promised += flight.job.kv.bytes  # others wait for it to go
        insort(self.offered, flight, key=lambda one: one.job.arrived)

    def _hand_over(self) -> None:
        """Find workers with room for what is offered, first come first served."""
        assert self.policy is not None
        while self.offered:
            flight = self.offered[0]
            job = flight.job
            assert job.kv is not None
            pooled = flight.member.spec.pooled
            room = 0 if pooled else rounded(job.known) * self.layout.engine.row_bytes
            views = [
                member.handle
                for member in self.members
                if member.ready and has_room(member.handle, member.station, room)
            ]
            handle = self.policy.go_on(job.known, views)
            if handle is None:
                return
            self.offered.pop(0)
            target = next(member for member in self.members if member.handle is handle)
            flight.target, flight.room, flight.paired = target, room, True
            target.handle.promised += room
            target.handle.coming += 1
            target.handle.decoding += job.known
            latency = 0.0
            if not pooled:
                self._carry(flight, job.computed * self.layout.engine.row_bytes)
                latency = self.layout.link.latency
            self.world.at(max(self.world.now, flight.until) + latency, self._arrive, flight, job.attempt)

    def _arrive(self, flight: Flight, attempt: int) -> None:
        """All of a KV is at its target."""
        if flight.job.attempt != attempt or flight.target is None:
            return
        flight.target.arrivals.append(flight)
        self._wake(flight.target)

    def _land(self, member: Member) -> None:
        """Take over what has arrived, as far as there is room. Requests that wait for memory here go first."""
        station = member.station
        while member.arrivals:
            flight = member.arrivals[0]
            job = flight.job
            if not flight.pushed and (len(station.running) >= self.layout.engine.max_running):
                return
            need = rounded(job.known) * self.layout.engine.row_bytes
            source = flight.member
            if flight.room and not flight.pushed and (station.waiting or not station.store.room(need)):
                return
            member.arrivals.pop(0)
            held, computed = job.kv, job.computed
            assert held is not None
            pooled = flight.room == 0
            if not flight.pushed:
                source.station.room.promised -= held.bytes
            if source.alive:
                source.station.queues.drop(cast(Any, job))
                job.release()
                if pooled:  # what one worker lets go of is there for the other
                    _settle(source.station)
            self._unpair(flight)
            if pooled:
                station.store.room(need)
            job.kv = Held(station.store, rounded(job.known))
            job.kv.spare -= computed
            job.departs = False
            flight.member, flight.target, flight.pushed, flight.room = member, None, False, 0
            station.resume(job)
            self.handoffs += 1
            if job.sent_at is not None:
                self.handoff_seconds.append(self.world.now - job.sent_at)
            if source.alive:
                self._wake(source)

    # ---- controllers
    def _adjust(self, policy: Adjusting, progressed: list[Job]) -> None:
        callers = (flight.job for flight in self.flights.values())
        views = [member.handle for member in self.members]
        for handle, command in policy.adjust(views, progressed, callers, self.world.now):
            member = next(member for member in self.members if member.handle is handle)
            if command["do"] == "cores":
                member.cores = tuple(command["cores"])
                member.station.cost = self.layout.cost(member.spec.role, command["threads"])
                self._beside(member.station, command["threads"])
            elif command["do"] == "spare":
                member.station.store.prefixes.shrink(command["bytes"])

    def _look_round(self, member: Member) -> None:
        """Who else is within a step: some on cores of the same machine, some on the very same cores."""
        mine, station = set(member.cores or ()), member.station
        station.others, station.sharers = [], []
        for other in self.members:
            if other is not member and other.stepping:
                apart = mine.isdisjoint(other.cores or ())
                (station.others if apart else station.sharers).append(other.station.path)

    # ---- the dead
    def kill(self, number: int) -> None:
        """A worker dies. Its requests start again elsewhere, from the tokens that the router has."""
        dead = self.members[number]
        dead.alive = dead.ready = False
        self.lost += 1
        self.retired.append(dead.station)
        if self._table is not None:
            self._table.clear(dead.handle.name, ())
        new = self.members[number] = self._launch(dead.spec)
        new.ready = False
        self.world.at(self.world.now + self.layout.revive, self._revive, new)
        for flight in list(self.flights.values()):
            offered = flight.member is dead and flight in self.offered
            there = not flight.pushed or flight.until <= self.world.now  # its KV is, or in nobody's memory but its own
            safe = offered or (flight.done and flight.target is not None and there)
            if flight.target is dead or (flight.member is dead and not safe):
                self._restart(flight, dead)

    def _restart(self, flight: Flight, dead: Member) -> None:
        job, member = flight.job, flight.member
        if flight.goes_on is not None:
            flight.goes_on.handle.decoding -= job.known
        if not flight.done:
            member.handle.prefilling -= flight.weight
        self._unpair(flight)
        if flight.target is not None and flight in flight.target.arrivals:
            flight.target.arrivals.remove(flight)
        if flight in self.offered:
            self.offered.remove(flight)
        if member is not dead and member.alive:  # its target has died
            if job.kv is not None and not flight.pushed and flight.done:
                member.station.room.promised -= job.kv.bytes
            member.station.queues.drop(cast(Any, job))
            job.release()
        del self.flights[job.id]
        job.restart()
        self.restarts += 1
        self.add(job)

    def _revive(self, member: Member) -> None:
        member.ready = True
        self._wake(member)
        if self.offered:
            self._hand_over()


def _settle(station: Station) -> None:
    if isinstance(station.store.ledger, Account):
        station.store.ledger.settle(0)
