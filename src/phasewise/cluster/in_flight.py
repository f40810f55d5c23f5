"""One caller's request on its way through the workers, and the move of its KV from one to another."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from phasewise.child import Message
from phasewise.cluster.handle import WorkerHandle
from phasewise.cluster.transfer_buffer import Parcel
from phasewise.kv.handoff import State, advance
from phasewise.request.request import Request


@dataclass(slots=True, eq=False)
class HandoffTransfer:
    """The state machine of one hand-off (kv/handoff.py), as the router sees it.

                     pull                               push
        reserved     the prompt is done                 a worker keeps room for it, before its prompt is computed
        sending      a worker was told to take it       pieces of it are on their way
        delivered    the worker knows that              the last piece is
        owned        the worker goes on with it
        released     it is over, the transfer buffer is free

    `offer` is None until the prompt is done and all its KV known to lie in the transfer buffer or to have been copied
    from it.
    """

    deadline: float = math.inf  # seconds of the router's clock; what was not heard of by then is taken for lost
    offer: Message | None = None
    target: WorkerHandle | None = None
    state: State = State.RESERVED
    room: int = 0  # bytes that the target has promised, if the KV is pushed
    pieces: dict[int, Parcel] = field(default_factory=dict)  # in the transfer buffer, and not known to have been copied

    @property
    def pushed(self) -> bool:
        return self.room > 0

    @property
    def n_bytes(self) -> int:
        return self.room if self.offer is None or self.pushed else int(self.offer["room"])

    @property
    def parcels(self) -> list[Parcel]:
        """Its parcels that lie in the transfer buffer."""
        return [*self.pieces.values(), *([] if self.offer is None else [self.offer["parcel"]])]

    def to(self, state: State) -> None:
        self.state = advance(self.state, state)

    def send(self, target: WorkerHandle, deadline: float) -> None:
        """Tell a worker to take it over."""
        assert self.offer is not None and self.target is None
        self.to(State.SENDING)
        self.target, self.deadline = target, deadline
        target.promised += self.n_bytes
        target.coming += 1
        target.tell({"do": "take"} | {key: self.offer[key] for key in ("id", "attempt", "packed", "parcel", "room")})

    # ---- push
    def expect(self, target: WorkerHandle, order: Message, room: int) -> None:
        """Tell a worker to keep so many bytes for what will come."""
        self.target, self.room = target, room
        target.promised += room
        target.coming += 1
        target.tell({"do": "expect"} | order)

    def pass_on(self, event: Message) -> None:
        """Tell the target of a piece."""
        assert self.target is not None
        if self.state is State.RESERVED:
            self.to(State.SENDING)
        if "packed" not in event:
            self.pieces[event["piece"]] = event["parcel"]
        else:
            if self.state is State.SENDING:
                self.to(State.DELIVERED)
            self.offer = event
        known = ("id", "attempt", "piece", "blocks", "parcel", "packed", "rows_at")
        self.target.tell({"do": "piece"} | {key: event[key] for key in known if key in event})

    def overdue(self, now: float) -> bool:
        """Returns whether it is taken for lost. A move that waits for room, here or at its target, is not."""
        if self.offer is None or self.pushed:
            return now > self.deadline
        queued = self.target is not None and self.offer["id"] in self.target.state["arrivals"]
        if queued and self.state is State.SENDING:
            self.to(State.DELIVERED)
        return now > self.deadline and not queued and self.state is not State.RESERVED

    def end(self, state: State) -> None:
        """It is owned or released: the target is promised nothing more."""
        self.to(state)
        if self.target is not None:
            self.target.promised -= self.n_bytes
            self.target.coming -= 1
            self.target = None


@dataclass(slots=True, eq=False)
class InFlight:
    """A request under way: at `handle`, computed by its attempt number `attempt`, or moving away from there.

    Attempts are numbered in order, none twice; `number` says in which order requests came. `tries` are the attempts in
    a row that brought no token; `held` says that it waits to be tried again.
    """

    caller: Request
    handle: WorkerHandle
    attempt: int
    number: int
    tries: int = 1
    held: bool = False
    transfer: HandoffTransfer | None = None
    settled: bool = False  # nothing has to be done for it where it is
    moved: bool = False  # its prompt was computed elsewhere, but perhaps for an incomplete block of a diffusion model
    prefills: tuple[WorkerHandle, int] | None = None  # the load it counts as: where its prompt is computed, tokens ...
    decodes: tuple[WorkerHandle, int] | None = None  # ... and where it generates, or will

    @property
    def departs(self) -> bool:
        """It leaves its worker when its prompt is done."""
        return self.transfer is not None or not self.handle.spec.decodes

    @property
    def goes_on(self) -> WorkerHandle | None:
        """The worker that generates its tokens, or will; None while nobody has been chosen."""
        if not self.departs:
            return self.handle
        return None if self.transfer is None else self.transfer.target

    def weigh(self) -> None:
        """Bring the load of its workers up to date with where it is now."""
        if self.prefills is None and self.decodes is not None and self.transfer is None and not self.held:
            handle, tokens = self.decodes
            if handle is self.handle:  # it has grown
                handle.generating += self.caller.known - tokens
                self.decodes = handle, self.caller.known
                return
        self.unload()
        if self.held:
            return
        tokens, goes_on = self.caller.known, self.goes_on
        if self.computing:
            self.handle.prefilling += tokens
            self.prefills = self.handle, tokens
        if goes_on is not None:
            goes_on.generating += tokens
            self.decodes = goes_on, tokens

    def unload(self) -> None:
        """Count as no load anywhere."""
        if self.prefills is not None:
            self.prefills[0].prefilling -= self.prefills[1]
            self.prefills = None
        if self.decodes is not None:
            self.decodes[0].generating -= self.decodes[1]
            self.decodes = None

    @property
    def computing(self) -> bool:
        """Its prompt is not done."""
        return self.caller.prefilling and not self.moved and (self.transfer is None or self.transfer.offer is None)

    @property
    def homeless(self) -> bool:
        """It leaves its worker, and no other worker has been chosen yet."""
        return self.departs and (self.transfer is None or self.transfer.target is None)
