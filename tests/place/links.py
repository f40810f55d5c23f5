"""Links that misbehave, and what must hold of a disaggregated placement between any two steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from torch import Tensor

from phasewise.invariants import check
from phasewise.kv.handoff import Header, Loopback, State
from phasewise.methods.place.disaggregated import Pools
from phasewise.request import Request
from tests import tiny


class Clock:
    """Seconds that pass only when we say so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Unreliable(Loopback):
    """Does to its i-th message what `fate(i)` says: a number of `receive` rounds to wait, "lose", "twice" or "fail"."""

    def __init__(self, fate: Callable[[int], int | str]) -> None:
        super().__init__()
        self.fate = fate
        self.sent = 0
        self.round = 0
        self.late: deque[tuple[int, Header, Sequence[Tensor]]] = deque()

    def send(self, header: Header, tensors: Sequence[Tensor]) -> None:
        fate = self.fate(self.sent)
        self.sent += 1
        if fate == "fail":
            raise ConnectionError("the other side is gone")
        if fate == "twice":
            super().send(header, tensors)
            super().send(header, [t.clone() for t in tensors])
        elif isinstance(fate, int):
            self.late.append((self.round + fate, header, tensors))

    def receive(self) -> tuple[Header, Sequence[Tensor]] | None:
        found = super().receive()
        if found is not None:
            return found
        for message in self.late:
            if message[0] <= self.round:
                self.late.remove(message)
                super().send(*message[1:])
                return super().receive()
        self.round += 1
        return None


def check_pools(pools: Pools) -> None:
    """Every engine's invariants, and those of what lies between them."""
    for engine in pools.engines:
        check(engine)
    decode = pools.decode
    assert decode.room.promised == sum(handoff.room for handoff in pools._moving.values())
    for handoff in pools._moving.values():
        assert handoff.state is State.SENDING and handoff.request.left is None
        assert handoff.request in pools._home[handoff.request].departed, "its KV must stay until the move is owned"
    for request, engine in pools._home.items():
        assert request in engine.queues and request.left is None
    for twin, caller in pools._caller.items():
        assert twin in decode.queues and caller.left is None and caller.kv is None
        assert twin.tokens == caller.tokens
    assert len(pools.waiting) + len(pools.running) == len(pools._home) + len(pools._caller)
    assert not set(pools._home) & set(pools._caller.values()), "a request is in two places"


def finish(pools: Pools, requests: Sequence[Request], each: Callable[[], None] | None = None) -> None:
    """Step until all have left, checking everything; then nothing may be left behind on either side."""
    for _ in range(3000):
        if all(r.left is not None for r in requests):
            break
        pools.step()
        check_pools(pools)
        if each is not None:
            each()
    else:
        raise AssertionError(f"still running: {[r for r in requests if r.left is None]}")
    check_pools(pools)
    assert pools.idle and not pools._moving
    pools.forget_prefixes()
    assert [engine.kv_bytes for engine in pools.engines] == [0] * len(pools.engines)


def pools(
    verbs: dict[str, str] | None = None,
    fate: Callable[[int], int | str] | None = None,
    knobs: str = "",
    **options: object,
) -> Pools:
    """A disaggregated placement over a tiny model, with a link of our choice."""
    placed = tiny.engine({"place": "disaggregated" + knobs, **(verbs or {})}, **options)
    assert isinstance(placed, Pools)
    if fate is not None:
        placed.link = Unreliable(fate)
    return placed
