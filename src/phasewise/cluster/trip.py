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
    receipt: int = 0  # the number of the command that told the target
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
        self.receipt = target.told

    def check_receipt(self) -> None:
        sent = self.state is State.SENDING and self.target is not None
        if sent and self.target.state.get("heard", 0) >= self.receipt:  # type: ignore[union-attr]
            self.to(State.DELIVERED)

    def overdue(self, now: float) -> bool:
        """Whether it is taken for lost. One that waits for room, here or at its target, is not."""
        waits = self.offer is not None and self.state is State.RESERVED
        queued = self.state is State.DELIVERED and self.target is not None and self.target.state["arrivals"] > 0
        return now > self.deadline and not (waits or queued)

    def end(self, state: State) -> None:
        """It is owned or released: the target is promised nothing more."""
        self.to(state)
        if self.target is not None:
            self.target.promised -= self.n_bytes
            self.target.coming -= 1
            self.target = None


@dataclass(slots=True, eq=False)
class Trip:
    """Where a request is: at `desk`, computed by its attempt number `attempt`, or moving away from there."""

    caller: Request
    desk: Desk
    attempt: int = 0
    move: Move | None = None

    @property
    def departs(self) -> bool:
        """Whether its worker computes prompts only."""
        return len(self.desk.spec.phases) == 1
