"""Checks of what holds between any two steps of an engine. They are cheap enough to run whenever it is idle."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from phasewise.kv.buffer import Buffer
from phasewise.kv.cache import KV

if TYPE_CHECKING:
    from phasewise.engine.engine import Engine
    from phasewise.engine.queues import Queues
    from phasewise.request.request import Request


def check(engine: Engine) -> None:
    """Raise AssertionError naming the request, or the bytes, that break a rule."""
    queues = engine.queues
    everyone: list[Request] = [*queues.waiting, *queues.running, *queues.departed]
    _check_places(queues, everyone)
    for request in everyone:
        assert request.left is None, f"{request} has left but is still queued"
        assert 0 <= request.computed <= request.known, f"{request} has computed more than is known"
        assert (request.slice is not None) == (request.depth > 0), f"{request} is half under way"
    for request in queues.waiting:
        assert request.kv is None and not request.state and not request.computed, f"{request} waits but holds memory"
    for request in [*queues.running, *queues.departed]:
        assert request.kv is not None, f"{request} runs without KV"
        under_way = request.slice.rows if request.slice is not None else 0
        assert all(layer.fresh <= under_way for layer in request.kv.layers), f"{request} has uncommitted rows"
        assert all(layer.beside.bytes <= layer.beside.booked for layer in request.kv.layers), f"{request} overdraws"
    ledger = engine.ledger
    held = engine.room.promised + engine.prefix_bytes + _bytes(request.kv for request in everyone)
    assert 0 <= held <= ledger.used <= ledger.limit, f"held {held}, used {ledger.used}, limit {ledger.limit}"
    if not any(request.state for request in everyone):
        assert held == ledger.used, f"{ledger.used - held} bytes of KV belong to nobody"


def _check_places(queues: Queues, everyone: Sequence[Request]) -> None:
    """Each of `everyone` is in one queue, in its order, and registered; nobody else is."""
    assert len(set(everyone)) == len(everyone), "a request is in two places"
    assert all(request in queues for request in everyone), "a request is in a queue but not registered"
    assert len(queues) == len(everyone), "a registered request is in no queue"
    for queue in (queues.waiting, queues.running, queues.departed):
        ranks = [queues.rank(request) for request in queue]
        assert ranks == sorted(ranks), f"out of order: {queue}"


def _bytes(kvs: Iterable[KV | None]) -> int:
    """Bytes of all buffers and of what is booked beside them, those shared by forks counted once."""
    every = list(kvs)
    rows = {id(buffer): buffer.bytes for kv in every for buffer in _buffers(kv)}
    beside = {id(layer.beside): layer.beside.booked for kv in every if kv is not None for layer in kv.layers}
    return sum(rows.values()) + sum(beside.values()) + sum(kv.drawn for kv in every if kv is not None)


def _buffers(kv: Any) -> Iterator[Buffer]:
    for layer in kv.layers if kv is not None else ():
        for slab in layer.slabs:
            yield slab.buffer
        yield from () if layer.blocks is None else layer.blocks.held
