"""Requests that change workers: who goes on with a prompt that is done, and what becomes of its KV on the way.

A move is a `HandoffTransfer`: KV waits in the transfer buffer until a worker with room takes it (pull), or goes piece
by piece to a worker that keeps room for it while the prompt is computed (push). Whatever is refused, lost or overdue
has one answer, and the router gives it: the request starts again from its tokens.
"""

from __future__ import annotations

import math
from bisect import insort
from typing import TYPE_CHECKING

from phasewise.child import Message
from phasewise.cluster.handle import WorkerHandle
from phasewise.cluster.in_flight import HandoffTransfer, InFlight
from phasewise.cluster.load import has_room, may_keep
from phasewise.cluster.policy import Pairing
from phasewise.cluster.worker import LEASE
from phasewise.kv.handoff import State

if TYPE_CHECKING:
    from phasewise.cluster.router import Router


class Handover:
    """The moves of a router's requests: what workers say of them, and what is to be done in every step.

    What hears an event is given the request, the worker that speaks, and its message.
    """

    def __init__(self, router: Router) -> None:
        self.router = router
        self.unmet = 0  # prompts for which no worker could keep room
        self._renewed = 0.0
        self._homeless: dict[InFlight, None] = {}  # nobody has been found yet who goes on with them
        self._kept: dict[InFlight, None] = {}  # a worker keeps room for them, and nothing has been sent yet
        self._ready: list[InFlight] = []  # all of their KV waits for somebody to take it; by arrival
        self.hears = {
            "offer": self.offered, "owned": self.owned, "refused": self.refused, "expired": self.expired,
            "piece": self.piece, "landed": self.landed, "full": self.full,
        }  # fmt: skip

    # ---- indices of the requests that wait, so that no step goes through all of them
    def follow(self, flight: InFlight) -> None:
        """Note what a request that has moved waits for now."""
        move = flight.transfer
        _sort(self._homeless, flight, flight.homeless)
        _sort(self._kept, flight, move is not None and move.pushed and move.state is State.RESERVED)
        ready = move is not None and move.state is State.RESERVED and move.offer is not None
        if ready and flight not in self._ready:
            insort(self._ready, flight, key=_arrival)
        elif not ready and flight in self._ready:
            self._ready.remove(flight)

    def forget(self, flight: InFlight) -> None:
        """The request has left."""
        self._homeless.pop(flight, None)
        self._kept.pop(flight, None)
        if flight in self._ready:
            self._ready.remove(flight)

    # ---- what workers say
    def set_out(self, flight: InFlight) -> None:
        """The prompt is done, or its first tokens are there."""
        flight.transfer = flight.transfer or HandoffTransfer()
        if flight.transfer.deadline == math.inf:
            flight.transfer.deadline = self.router.clock() + self.router.timeouts.handoff
            trace = flight.caller.trace
            trace.sent, trace.by["sent"] = self.router.clock(), flight.handle.name

    def offered(self, flight: InFlight, handle: WorkerHandle, event: Message) -> None:
        if handle is not flight.handle:
            return  # said twice
        pushed = flight.transfer is not None and flight.transfer.pushed
        if "piece" in event and not pushed:
            self.router.restart(flight, "received a KV chunk for a cancelled transfer")
        elif flight.departs:
            self.set_out(flight)
            assert flight.transfer is not None
            if pushed:
                flight.transfer.deadline = self.router.clock() + self.router.timeouts.handoff
                flight.transfer.pass_on(event)
            flight.transfer.offer = flight.transfer.offer or event

    def owned(self, flight: InFlight, handle: WorkerHandle, event: Message) -> None:
        if flight.transfer is not None and flight.transfer.target is handle:
            self.own(flight, handle, event.get("seconds", 0.0))

    def own(self, flight: InFlight, handle: WorkerHandle, seconds: float = 0.0) -> None:
        """The target has the request, whose KV took `seconds` to get there: the transfer buffer may forget it."""
        assert flight.transfer is not None and flight.transfer.offer is not None
        source, parcels = flight.handle, flight.transfer.parcels
        flight.transfer.end(State.OWNED)
        if source in self.router.handles:
            source.tell({"do": "release", "id": flight.caller.id, "attempt": flight.attempt, "seconds": seconds})
        else:
            for parcel in parcels:
                self.router.launcher.transfer_buffer.drop(parcel)
        flight.transfer.to(State.RELEASED)
        flight.handle, flight.transfer, flight.moved = handle, None, True
        trace = flight.caller.trace
        trace.owned, trace.by["owned"] = self.router.clock(), handle.name

    def refused(self, flight: InFlight, handle: WorkerHandle, event: Message) -> None:
        if flight.transfer is not None and flight.transfer.target is handle:
            self.router.restart(flight, event["why"])

    def expired(self, flight: InFlight, handle: WorkerHandle, event: Message) -> None:
        if handle is flight.handle or (flight.transfer is not None and handle is flight.transfer.target):
            self.router.restart(flight, "its KV was dropped from the transfer buffer: nobody took it within its lease")

    # ---- push: room is kept before the prompt is computed
    def reserve_peer(self, flight: InFlight, policy: Pairing) -> None:
        """Choose who goes on with a request before its prompt is computed, and have room kept there. None may overtake
        requests that wait for room."""
        tokens = flight.caller.known + 1
        parts = self.router.fronts[-1].parts
        room = parts.recipes[flight.caller.recipe].store.cost(tokens)
        queued = len(self._homeless) > (flight in self._homeless)
        free = [] if queued else self.router.handles
        views = [handle for handle in free if may_keep(handle, parts, room, self.router.flights)]
        target = policy.reserve_peer(flight.caller.tokens, flight.handle, views)
        if target is None:
            self.unmet += 1
        elif target is not flight.handle:
            flight.transfer = HandoffTransfer()
            order = {"id": flight.caller.id, "attempt": flight.attempt}
            flight.transfer.expect(target, order | {"recipe": flight.caller.recipe, "tokens": tokens}, room)

    def _part(self, flight: InFlight) -> None:
        """Nobody keeps room for a request any more: its prompt goes on, and then whoever has room takes it over."""
        assert flight.transfer is not None
        order = {"id": flight.caller.id, "attempt": flight.attempt}
        if flight.transfer.target in self.router.handles:
            flight.transfer.target.tell({"do": "cancel"} | order)
        flight.transfer.end(State.RELEASED)
        flight.transfer = None
        self.router.note(flight)
        flight.handle.tell({"do": "keep"} | order)

    def piece(self, flight: InFlight, handle: WorkerHandle, event: Message) -> None:
        if handle is flight.handle and flight.transfer is not None and flight.transfer.pushed:
            flight.transfer.pass_on(event)

    def landed(self, flight: InFlight, handle: WorkerHandle, event: Message) -> None:
        if flight.transfer is None or handle is not flight.transfer.target:
            return
        copied = [flight.transfer.pieces.pop(number, None) for number in event["pieces"]]
        if flight.handle in self.router.handles:
            flight.handle.tell({"do": "release"} | {key: event[key] for key in ("id", "attempt", "pieces")})
        else:  # it is dead, and cannot free them
            for parcel in filter(None, copied):
                self.router.launcher.transfer_buffer.drop(parcel)

    def full(self, flight: InFlight, handle: WorkerHandle, event: Message) -> None:
        if flight.transfer is None or handle is not flight.transfer.target:
            return
        if _unfinished(flight):
            self._part(flight)
        else:
            self.router.restart(flight, "its peer had no room for its KV")

    # ---- every step
    def hand_over(self) -> None:
        """Tell workers with room to take what waits in the transfer buffer, first come first served."""
        handles, parts = self.router.handles, self.router.fronts[-1].parts
        while self._ready:
            flight = self._ready[0]
            assert flight.transfer is not None
            views = [handle for handle in handles if has_room(handle, parts, flight.transfer.n_bytes)]
            target = self.router.policy.go_on(flight.caller.known, views)
            if target is None:
                if unfinished := [each for each in self._kept if _unfinished(each)]:  # what is done goes first
                    self._part(max(unfinished, key=lambda each: each.number))
                return
            flight.transfer.send(target, self.router.clock() + self.router.timeouts.handoff)
            self.router.note(flight)

    def check_timeouts(self) -> None:
        """Give up moves that are overdue, and renew the lease of KV that waits."""
        now = self.router.clock()
        waiting: dict[WorkerHandle, list[str]] = {}
        for flight in list(self.router.flights.values()):
            if flight.transfer is None:
                continue
            if flight.transfer.overdue(now):
                limit = self.router.timeouts.handoff
                self.router.restart(flight, f"its hand-off was not answered within {limit} s")
                continue
            waiting.setdefault(flight.handle, []).append(flight.caller.id)
            if flight.transfer.pushed and flight.transfer.target is not None:
                waiting.setdefault(flight.transfer.target, []).append(flight.caller.id)
        if now - self._renewed > LEASE / 4:
            self._renewed = now
            for handle in self.router.handles:
                if handle in waiting or not handle.quiet:  # or what it was told last is lost
                    handle.tell({"do": "renew", "ids": waiting.get(handle, [])})


def _sort(group: dict[InFlight, None], flight: InFlight, belongs: bool) -> None:
    if belongs:
        group[flight] = None
    else:
        group.pop(flight, None)


def _unfinished(flight: InFlight) -> bool:
    """True if a prompt with room kept for it is still computed. Whatever is lost later, its hand-off has a deadline."""
    move = flight.transfer
    return flight.computing and move is not None and move.deadline == math.inf


def _arrival(flight: InFlight) -> tuple[float, int]:
    return flight.caller.trace.arrived, flight.number
