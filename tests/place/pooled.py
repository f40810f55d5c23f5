"""Placements whose workers share a pool, in this thread, and what must hold of the pool between any two steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from phasewise.cluster.ownership import OwnershipBuffer
from phasewise.cluster.pool import BYTES, OWNER, TICKET, Account, key
from phasewise.cluster.router import Router
from phasewise.cluster.shared_pool import InlineMemory, SharedPool
from phasewise.engine.invariants import _buffers, check
from phasewise.request.request import Request
from tests.cluster.faulty import HEARD, TOLD, Fate, Faulty
from tests.place.links import Clock, check_desks, check_place, check_worker, disaggregated, engines, workers


def semi_pd(
    verbs: dict[str, str] | None = None,
    fate: Callable[[int], Fate] | None = None,
    kinds: Sequence[str] = TOLD + HEARD,
    clock: Clock | None = None,
    **limits: object,
) -> Router:
    return disaggregated({"place": "semi_pd", **(verbs or {})}, fate, kinds, clock=clock, **limits)


def pool(placed: Router) -> SharedPool:
    launcher = placed.launcher.launcher if isinstance(placed.launcher, Faulty) else placed.launcher
    assert isinstance(launcher.transfer_buffer, OwnershipBuffer)
    return launcher.transfer_buffer.pool


def account(placed: Router, role: str) -> Account:
    (engine,) = engines(placed, role)
    assert isinstance(engine.store.ledger, Account)
    return engine.store.ledger


def check_pool(placed: Router) -> None:
    """Every engine's invariants, and that every byte of the pool belongs to somebody, and to one."""
    for worker in workers(placed):
        check(worker.engine)
        check_worker(worker)
    check_desks(placed)
    for name in placed.flights:
        check_place(placed, name)
    table, memory = pool(placed).table, pool(placed).memory
    assert isinstance(memory, InlineMemory)
    assert table.peak <= table.limit
    rows = table._rows[table._rows[:, OWNER] != 0]
    accounts = {engine.store.ledger.owner: engine.store.ledger for engine in engines(placed)}
    known = {key(owner): account.claimed for owner, account in accounts.items()}
    assert {int(row[OWNER]): int(row[BYTES]) for row in rows if not row[TICKET]} == known
    assert all(account.used <= account.claimed for account in accounts.values())
    loans = list(_loans(placed))
    assert {int(row[TICKET]) for row in rows if row[TICKET]} <= {loan["ticket"] for loan in loans}
    lent = {name for loan in loans for name in loan["names"]}
    held = {buffer.name for engine in engines(placed) for r in _holders(engine) for buffer in _buffers(r.kv)}
    remains = [left.kv for engine in engines(placed) for left in engine.prefixes.retained._kept.values()]
    held |= {buffer.name for kv in remains for buffer in _buffers(kv)}
    assert held <= memory.planes.keys()
    if not any(r.state for engine in engines(placed) for r in _holders(engine)):
        assert memory.planes.keys() <= held | lent, "planes that nobody has"


def _holders(engine: object) -> list[Request]:
    return [*engine.running, *engine.departed]


def _loans(placed: Router) -> Iterator[dict]:
    """What live workers offer, and what is on its way from dead ones."""
    for worker in workers(placed):
        for offer in worker._offers.values():
            yield offer.parcel["loan"]
    for flight in placed.flights.values():
        for parcel in flight.transfer.parcels if flight.transfer is not None else ():
            yield parcel["loan"]


def finish(placed: Router, requests: Sequence[Request], each: Callable[[], None] = lambda: None) -> None:
    """Step until all have left and all is quiet, checking everything; then the pool must be empty."""
    for _ in _steps(placed, each):
        if all(r.left is not None for r in requests) and placed.idle and not list(_loans(placed)):
            break
    placed.forget_prefixes()
    for _ in _steps(placed, each):
        if placed.idle:
            break
    assert pool(placed).table.used == placed.kv_bytes == 0 and not pool(placed).memory.planes
    assert not any(worker._jobs or worker._offers or worker._arrivals for worker in workers(placed))


def _steps(placed: Router, each: Callable[[], None]) -> Iterator[None]:
    for _ in range(3000):
        check_pool(placed)
        yield
        placed.step()
        each()
    raise AssertionError(f"no end: {list(placed.flights.values())}")
