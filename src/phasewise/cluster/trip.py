"""One caller's request on its way through the workers, and the move of its KV from one to another."""

from __future__ import annotations

from dataclasses import dataclass

from phasewise.cluster.desk import Desk
from phasewise.cluster.line import Message
from phasewise.kv.handoff import State, advance
from phasewise.request import Request


@dataclass(slots=True, eq=False)
class Move:
    """The state machine of one hand-off (kv/handoff.py), as the router sees it.

        reserved: the prompt is done         sending: a worker was told to take it     delivered: the worker heard that
        owned: the worker goes on with it    released: it is over, the depot is free

    `offer` is None until the KV is known to lie in the depot.
    """

    deadline: float  # seconds of the router's clock; what was not heard of by then is taken for lost
    offer: Message | None = None
    target: Desk | None = None
    state: State = State.RESERVED

    @property
    def n_bytes(self) -> int:
        return 0 if self.offer is None else int(self.offer["room"])

    def to(self, state: State) -> None:
        self.state = advance(self.state, state)

    def send(self, target: Desk, deadline: float) -> None:
        """Tell a worker to take it over."""
        assert self.offer is not None and self.target is None
        self.to(State.SENDING)
        self.target, self.deadline = target, deadline
        target.promised += self.n_bytes
        target.coming += 1
        target.tell({"do": "take"} | {key: self.offer[key] for key in ("id", "attempt", "packed", "parcel", "room")})

    def overdue(self, now: float) -> bool:
        """Whether it is taken for lost. One that waits for room, here or at its target, is not."""
        if self.offer is None:
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
class Trip:
    """Where a request is: at `desk`, computed by its attempt number `attempt`, or moving away from there.

    Attempts are numbered in order, none twice. `tries` are those in a row that brought no token; `held` says that it
    waits to be tried again.
    """

    caller: Request
    desk: Desk
    attempt: int
    tries: int = 1
    held: bool = False
    move: Move | None = None

    @property
    def departs(self) -> bool:
        """Whether its worker computes prompts only."""
        return len(self.desk.spec.phases) == 1
