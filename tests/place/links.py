"""Disaggregated placements over a bad line, and what must hold of a router and its workers between any two steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from phasewise.builder import Builder
from phasewise.cluster.launcher import Launcher
from phasewise.cluster.router import Router
from phasewise.cluster.transfer_buffer import InlineBuffer
from phasewise.cluster.worker import Worker
from phasewise.engine.engine import Engine
from phasewise.engine.invariants import check
from phasewise.engine.limits import Limits
from phasewise.kv.handoff import State
from phasewise.options import parse
from phasewise.request.request import Request
from tests import tiny
from tests.cluster.faulty import HEARD, TOLD, Fate, Faulty

OPEN = (State.RESERVED, State.SENDING, State.DELIVERED)


class Clock:
    """Seconds that pass only when we say so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def tick(self) -> None:
        self.now += 1.0


def disaggregated(
    verbs: dict[str, str] | None = None,
    fate: Callable[[int], Fate] | None = None,
    kinds: Sequence[str] = TOLD + HEARD,
    knobs: str = "",
    clock: Clock | None = None,
    **limits: object,
) -> Router:
    """Prefill and decode apart (or another placement) over a tiny model, in this thread, with lines of our choice."""
    given = parse({"place": "disaggregated" + knobs, **(verbs or {})})
    plan = Builder(
        tiny.model(), given, Limits(**{"kv_bytes": 64 << 20, **limits}), load=tiny.load,
        **({} if clock is None else {"clock": clock}),
    )  # fmt: skip
    if fate is not None:
        launcher = Faulty(plan.launcher(), fate, kinds)
        plan.launcher = lambda: launcher
    placed = plan.build()
    assert isinstance(placed, Router)
    return placed


# ---- looking inside
def workers(placed: Router, role: str = "") -> list[Worker]:
    return [
        handle.connection.worker for handle in placed.handles if handle.connection.alive and role in ("", handle.role)
    ]


def engines(placed: Router, role: str = "") -> list[Engine]:
    return [worker.engine for worker in workers(placed, role)]


def shelf(placed: Router) -> InlineBuffer:
    assert isinstance(placed.launcher.transfer_buffer, InlineBuffer)
    return placed.launcher.transfer_buffer


def unheard(launcher: Launcher, name: str) -> bool:
    """Whether something said of a request was lost, or is late."""
    return isinstance(launcher, Faulty) and any(
        message.get("id") == name for message in [*launcher.lost, *launcher.late]
    )


# ---- what must hold
def check_router(placed: Router) -> None:
    """Every engine's invariants, and those of what lies between them."""
    for worker in workers(placed):
        check(worker.engine)
        check_worker(worker)
    check_parcels(placed)
    check_desks(placed)
    check_load(placed)
    for name, flight in placed.flights.items():
        caller = flight.caller
        assert caller.id == name and caller.left is None and caller.kv is None
        assert flight.transfer is None or flight.transfer.state in OPEN
        check_place(placed, name)
    current = {(name, flight.attempt) for name, flight in placed.flights.items() if not flight.held}
    for worker in workers(placed):
        for name, job in worker._jobs.items():
            assert (name, job.attempt) in current, f"{name} is computed for nobody"
            known = placed.flights[name].caller.tokens
            assert job.request.tokens == known and job.told == len(known)
    assert len({*placed.waiting, *placed.running}) == len(placed.waiting) + len(placed.running) == len(placed.flights)


def check_worker(worker: Worker) -> None:
    """What its engine has, it knows of, and what it has put down counts against its budget."""
    engine = worker.engine
    offered = sum(offer.n_bytes for offer in worker._offers.values())
    assert engine.room.promised == offered + worker._outbox.bytes + worker._inbox.bytes
    held = [*engine.waiting, *engine.running, *engine.departed]
    assert sorted(r.id for r in held) == sorted(worker._jobs)
    coming = worker._inbox._coming.keys()
    assert not worker._arrivals.keys() & worker._jobs.keys(), "a request arrives where it is"
    assert not coming & (worker._arrivals.keys() | worker._jobs.keys()), "a request is expected where it is"
    for sending in worker._outbox._sending.values():
        assert sending.parcels.keys() <= set(range(sending.sent.count))


def check_parcels(placed: Router) -> None:
    """Whatever lies on the shelf belongs to a worker, or to a move whose worker has died."""
    offered = {offer.parcel["name"] for worker in workers(placed) for offer in worker._offers.values()}
    for worker in workers(placed):
        offered |= {p["name"] for sending in worker._outbox._sending.values() for p, _ in sending.parcels.values()}
    alive = {handle.name for handle in placed.handles}
    moves = [flight.transfer for flight in placed.flights.values() if flight.transfer is not None]
    moving = {parcel["name"] for move in moves for parcel in move.parcels}
    orphans = {name for name in moving if name.rpartition(".")[0] not in alive}
    assert shelf(placed).parcels.keys() == offered | orphans


def check_desks(placed: Router) -> None:
    """What is promised to a worker is what is on its way there."""
    moves = [flight.transfer for flight in placed.flights.values() if flight.transfer is not None]
    for move in moves:
        assert (move.target is None) == (move.state is State.RESERVED and not move.pushed)
        assert move.target is None or move.target in placed.handles
    for handle in placed.handles:
        coming = [move for move in moves if move.target is handle]
        assert (handle.promised, handle.coming) == (sum(move.n_bytes for move in coming), len(coming))


def check_load(placed: Router) -> None:
    """The load of every worker, which the router keeps up to date, is that of the requests that are there now; and so
    are the lists of what waits."""
    flights = [flight for flight in placed.flights.values() if not flight.held]
    for handle in placed.handles:
        prefilling = sum(flight.caller.known for flight in flights if flight.handle is handle and flight.computing)
        decoding = sum(flight.caller.known for flight in flights if flight.goes_on is handle)
        assert (handle.prefilling, handle.decoding) == (prefilling, decoding)
    handover, every = placed.handover, list(placed.flights.values())
    assert {*handover._homeless} == {flight for flight in every if flight.homeless}
    waits = [flight for flight in every if flight.transfer is not None and flight.transfer.state is State.RESERVED]
    assert {*handover._kept} == {flight for flight in waits if flight.transfer and flight.transfer.pushed}
    ready = [flight for flight in waits if flight.transfer and flight.transfer.offer is not None]
    assert handover._ready == sorted(ready, key=lambda flight: flight.caller.arrived)


def check_place(placed: Router, name: str) -> None:
    """A request is computed in one place at most; in one at least it is held, if all was heard of it."""
    flight = placed.flights[name]
    jobs = [worker for worker in workers(placed) if name in worker._jobs]
    arrives = [worker for worker in workers(placed) if name in worker._arrivals]
    offers = [worker for worker in workers(placed) if _offers(worker, name, flight.attempt)]
    orphan = flight.transfer is not None and flight.transfer.offer is not None and flight.handle not in placed.handles
    assert len(jobs) + len(arrives) <= 1, f"{name} is in two places"
    assert len(offers) + orphan <= 1
    if flight.held:
        assert not jobs and not arrives
    elif jobs and flight.transfer is None:
        assert jobs == [flight.handle.connection.worker]
    elif not unheard(placed.launcher, name):
        assert jobs or arrives or offers or orphan, f"{name} is nowhere"


def _offers(worker: Worker, name: str, attempt: int) -> bool:
    return name in worker._offers and worker._offers[name].attempt == attempt


def finish(placed: Router, requests: Sequence[Request], each: Callable[[], None] = lambda: None) -> None:
    """Step until all have left and all is quiet, checking everything; then nothing may be left behind anywhere."""
    for _ in _steps(placed, each):
        expected = any(len(worker._inbox) for worker in workers(placed))  # a lost cancel costs a lease
        if all(r.left is not None for r in requests) and placed.idle and not shelf(placed).parcels and not expected:
            break
    placed.forget_prefixes()
    for _ in _steps(placed, each):
        if placed.idle:
            break
    assert placed.kv_bytes == 0
    assert [engine.kv_bytes for engine in engines(placed)] == [0] * len(engines(placed))
    for worker in workers(placed):
        left = worker._jobs, worker._offers, worker._arrivals, worker._inbox._coming, worker._outbox._sending
        assert not any(left), f"left behind: {left}"


def _steps(placed: Router, each: Callable[[], None]) -> Iterator[None]:
    for _ in range(3000):
        check_router(placed)
        yield
        placed.step()
        each()
    raise AssertionError(f"no end: {list(placed.flights.values())}")
