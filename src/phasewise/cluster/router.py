"""An engine made of workers: the same verbs, wherever the workers run, and nothing lost when one of them dies.

    add -> policy.start -> worker (prompt, first token) -> offer -> policy.go_on -> another worker -> ... -> left
             \\__ a worker that also decodes keeps the request to its end
        policy.meet -> another worker keeps room -> pieces of the KV, while the prompt is computed -> ... -> left

The caller's request stays here; workers compute twins of it and report tokens. Whatever goes wrong with a worker or a
move has one answer: start again from the tokens the caller has, elsewhere. Draws depend on seed and position alone, so
the stream goes on with the tokens it would have had.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from phasewise.cluster.desk import Desk
from phasewise.cluster.line import Crew, Message
from phasewise.cluster.load import has_room, may_keep, weigh
from phasewise.cluster.policy import Pairing, Policy, Tending
from phasewise.cluster.staff import Patience as Patience
from phasewise.cluster.staff import Staff
from phasewise.cluster.trip import Move, Trip
from phasewise.cluster.worker import LEASE
from phasewise.engine import Engine
from phasewise.errors import PhasewiseError, UserError
from phasewise.kv.handoff import State
from phasewise.request import Left, Request
from phasewise.trace import Counters

log = logging.getLogger(__name__)
PAUSE = 0.005  # seconds a step waits for something to happen
TRIES = 8  # attempts in a row without a token; a request that takes its workers with it must end ...
SUSPECT = 3  # ... and from this many on it is tried apart from others like it, which may be innocent
_HOLDING = ("offer", "piece", "owned")  # events of workers that hold something now


class Router:
    """Workers behind the verbs of a single engine. Single-threaded, like an engine.

    `fronts` are engines like the workers', which never run: they know what fits.
    """

    def __init__(
        self, crew: Crew, policy: Policy, fronts: Sequence[Engine], clock: Callable[[], float], patience: Patience
    ) -> None:
        self.crew, self.policy, self.fronts, self.clock, self.patience = crew, policy, list(fronts), clock, patience
        self.model = fronts[0].model
        self._emitted = self._restarts = self._unmet = 0
        self._trips: dict[str, Trip] = {}
        self._attempts = itertools.count()
        self._progressed: dict[Request, None] = {}  # ordered, each once
        self._renewed = 0.0
        self._closed = False
        self._verbs = {
            "progress": self._hear_progress, "offer": self._hear_offer, "owned": self._hear_owned,
            "refused": self._hear_refused, "expired": self._hear_expired,
            "piece": self._hear_piece, "landed": self._hear_landed, "full": self._hear_full,
        }  # fmt: skip
        try:
            self.staff = Staff(crew, policy.manning(), clock)
            while not self.staff.ready:
                self.step()
        except BaseException:
            self.close()
            raise

    # ---- what users of an engine call
    @property
    def desks(self) -> list[Desk]:
        return self.staff.desks

    @property
    def counters(self) -> Counters:
        """Of all workers together, as far as they have reported; tokens as they were given to the callers."""
        done = self.staff.counters
        fallbacks = done.push_fallbacks + self._unmet
        return replace(done, emitted=self._emitted, restarts=self._restarts, push_fallbacks=fallbacks)

    @property
    def workers(self) -> dict[str, int]:
        """How many of each role are alive and ready."""
        there = Counter({desk.role: 0 for desk in self.desks})
        there.update(desk.role for desk in self.desks if desk.line.alive and desk.state)
        return dict(there)

    @property
    def idle(self) -> bool:
        """Nothing is under way, and every worker has answered what it was told."""
        return not self._trips and all(desk.quiet for desk in self.desks)

    @property
    def waiting(self) -> list[Request]:
        """Without KV so far, or again."""
        held = {name for desk in self.desks for name in desk.state.get("waiting", ())}
        return [trip.caller for name, trip in self._trips.items() if name in held]

    @property
    def running(self) -> list[Request]:
        """With KV somewhere, or on the way."""
        held = set(self.waiting)
        return [trip.caller for trip in self._trips.values() if trip.caller not in held]

    @property
    def kv_bytes(self) -> int:
        return sum(desk.state.get("kv_bytes", 0) for desk in self.desks)

    @property
    def prefix_bytes(self) -> int:
        return sum(desk.state.get("prefix_bytes", 0) for desk in self.desks)

    def add(self, request: Request) -> None:
        """To the worker of its siblings, else to where the policy says."""
        if self._closed:
            raise PhasewiseError("the workers have been dismissed: nothing can be added after close()")
        if request.id in self._trips:
            raise UserError(f"a request with id {request.id!r} is already running: give each request its own id")
        for front in self.fronts:
            front.check(request)
        request.trace.arrived = self.clock()
        parent = None if request.parent is None else self._trips.get(request.parent.id)
        if parent is not None and not parent.held and parent.computing:
            self._trips[request.id] = trip = Trip(request, parent.desk, next(self._attempts))
            self._begin(trip, parent.caller)
        else:
            self._trips[request.id] = trip = Trip(request, self._start_of(request), next(self._attempts))
            self._begin(trip)

    def cancel(self, request: Request) -> bool:
        trip = self._trips.get(request.id)
        if trip is None or trip.caller is not request:
            return False
        self._stop(trip)
        self._leave(trip, Left("cancelled", "cancelled"))
        for desk in self.desks:
            self._hear(desk)  # workers in this thread have obeyed already
        return True

    def step(self) -> list[Request]:
        """Hear what the workers say, replace the dead, hand over what waits. Returns requests with tokens, or left.

        Raises Unstaffed when workers keep dying before they are ready.
        """
        self.staff.wait(PAUSE)
        for desk in list(self.desks):
            self._hear(desk)
        for desk, why in self.staff.dead(self.patience):
            self._hear(desk)
            self._lose(desk, why)
        self._chase()
        self._try_suspects()
        self._hand_over()
        progressed, self._progressed = list(self._progressed), {}
        if isinstance(self.policy, Tending):
            callers = (trip.caller for trip in self._trips.values())
            for desk, command in self.policy.tend(self.desks, progressed, callers, self.clock()):
                desk.tell(command)
        return progressed

    def forget_prefixes(self) -> None:
        for desk in self.desks:
            desk.forget_prefixes()
            desk.tell({"do": "forget"})
            self._hear(desk)

    def close(self) -> None:
        """Dismiss all workers."""
        self._closed = True
        self.crew.close()

    # ---- starting
    def _start_of(self, request: Request) -> Desk:
        """Where a request starts; one that has emitted starts again where it can go on."""
        weigh(self.desks, self._trips.values(), but=request)
        seated = self.staff.seated
        if not request.n_out:
            return self.policy.start(request.tokens, seated)
        desk = self.policy.go_on(request.known, [desk for desk in seated if len(desk.spec.phases) > 1])
        assert desk is not None
        return desk

    def _begin(self, trip: Trip, parent: Request | None = None) -> None:
        """Hand a request's tokens to its worker."""
        caller = trip.caller
        if isinstance(self.policy, Pairing) and self.policy.push and not caller.n_out:
            self._meet(trip, self.policy)
        command: Message = {"do": "add", "attempt": trip.attempt, "request": caller.header() | {"computed": 0}}
        command["push"] = trip.move is not None
        if parent is not None:
            command["parent"] = parent.id
        trip.desk.remember(caller.prompt)
        trip.desk.tell(command)

    def _restart(self, trip: Trip, why: str) -> None:
        """The one answer to every failure: start again from the tokens."""
        log.warning("request %s starts again from its %d tokens: %s", trip.caller.id, trip.caller.known, why)
        self._stop(trip)
        trip.attempt = next(self._attempts)
        if not trip.caller.n_out:
            trip.caller.computed = 0
        if trip.tries >= TRIES:
            self._leave(trip, Left("failed", f"it was started {TRIES} times in vain, at last: {why}"))
            return
        trip.tries += 1
        self._restarts += 1
        trip.held = trip.tries >= SUSPECT
        if not trip.held:
            trip.desk = self._start_of(trip.caller)
            self._begin(trip)

    def _try_suspects(self) -> None:
        """Start the next of the requests whose workers keep failing, if no other of them is under way."""
        suspects = [trip for trip in self._trips.values() if trip.tries >= SUSPECT]
        if suspects and all(trip.held for trip in suspects):
            suspects[0].held = False
            suspects[0].desk = self._start_of(suspects[0].caller)
            self._begin(suspects[0])

    def _stop(self, trip: Trip) -> None:
        """Tell everybody who holds something of a request to drop it."""
        gone = {"do": "cancel", "id": trip.caller.id, "attempt": trip.attempt}
        if trip.desk in self.desks:
            trip.desk.tell(gone)
        if trip.move is None:
            return
        target = trip.move.target
        trip.move.end(State.RELEASED)
        if target is not None and target in self.desks:
            target.tell(gone)
        for parcel in trip.move.parcels:  # its worker may be dead
            self.crew.depot.drop(parcel)
        trip.move = None

    # ---- hearing
    def _hear(self, desk: Desk) -> None:
        for event in self.staff.hear(desk):
            trip = self._trips.get(event["id"])
            if trip is not None and trip.attempt == event["attempt"]:
                self._verbs[event["event"]](trip, desk, event)
            elif event["event"] in _HOLDING or (event["event"] == "progress" and event["left"] is None):
                self._call_off(desk, event)

    def _hear_progress(self, trip: Trip, desk: Desk, event: Message) -> None:
        caller, move = trip.caller, trip.move
        if move is not None and desk is move.target:
            self._own_it(trip, desk)
        elif desk is not trip.desk:
            return
        left = None if event["left"] is None else Left(*event["left"])
        new = event["tokens"][max(0, caller.known - event["start"]) :]
        if caller.trace.admitted is None and event["queued"] is not None:
            caller.trace.admitted = caller.trace.arrived + event["queued"]
        try:
            if new:
                caller.computed = caller.high_water = caller.known
                trip.tries = 1
                self._emitted += caller.emit(new, self.model.config.eos, self.clock())
                if caller.left is not None and left is None:
                    self._call_off(desk, event)
                left = caller.left or left
        except Exception as error:  # raised by the caller's own watch
            self._call_off(desk, event)
            left = Left("failed", f"{type(error).__name__}: {error}")
        self._progressed[caller] = None
        if left is not None:
            if trip.move is not None:
                self._stop(trip)
            self._leave(trip, left)
        elif trip.departs:
            self._set_out(trip)

    def _call_off(self, desk: Desk, event: Message) -> None:
        """A worker need not go on with what it has reported."""
        desk.tell({"do": "cancel", "id": event["id"], "attempt": event["attempt"]})

    def _set_out(self, trip: Trip) -> None:
        """The prompt is done, or its first tokens are there."""
        trip.move = trip.move or Move()
        if trip.move.deadline == math.inf:
            trip.move.deadline = self.clock() + self.patience.move
            trip.caller.trace.sent = self.clock()

    def _hear_offer(self, trip: Trip, desk: Desk, event: Message) -> None:
        if desk is not trip.desk:
            return  # said twice
        pushed = trip.move is not None and trip.move.pushed
        if "piece" in event and not pushed:
            self._restart(trip, "what nobody expects any more was sent")
        elif trip.departs:
            self._set_out(trip)
            assert trip.move is not None
            if pushed:
                trip.move.deadline = self.clock() + self.patience.move
                trip.move.pass_on(event)
            trip.move.offer = trip.move.offer or event

    def _hear_owned(self, trip: Trip, desk: Desk, event: Message) -> None:
        if trip.move is not None and trip.move.target is desk:
            self._own_it(trip, desk, event.get("seconds", 0.0))

    def _own_it(self, trip: Trip, desk: Desk, seconds: float = 0.0) -> None:
        """The target has the request, whose KV took `seconds` to get there: the depot may forget it."""
        assert trip.move is not None and trip.move.offer is not None
        source, parcels = trip.desk, trip.move.parcels
        trip.move.end(State.OWNED)
        if source in self.desks:
            source.tell({"do": "release", "id": trip.caller.id, "attempt": trip.attempt, "seconds": seconds})
        else:
            for parcel in parcels:
                self.crew.depot.drop(parcel)
        trip.move.to(State.RELEASED)
        trip.caller.trace.owned = self.clock()
        trip.desk, trip.move = desk, None

    def _hear_refused(self, trip: Trip, desk: Desk, event: Message) -> None:
        if trip.move is not None and trip.move.target is desk:
            self._restart(trip, event["why"])

    def _hear_expired(self, trip: Trip, desk: Desk, event: Message) -> None:
        if desk is trip.desk or (trip.move is not None and desk is trip.move.target):
            self._restart(trip, "its KV is no longer in the depot")

    # ---- push
    def _meet(self, trip: Trip, policy: Pairing) -> None:
        """Choose who goes on with a request before its prompt is computed, and have room kept there. None may overtake
        requests that wait for room."""
        weigh(self.desks, self._trips.values(), but=trip.caller)
        tokens = trip.caller.known + 1
        parts = self.fronts[-1].parts
        room = parts.store.cost(tokens)
        queued = any(other.homeless for other in self._trips.values() if other is not trip)
        seats = [] if queued else [desk for desk in self.desks if may_keep(desk, parts, self._known(desk), room)]
        target = policy.meet(trip.caller.tokens, trip.desk, seats)
        if target is None:
            self._unmet += 1
        elif target is not trip.desk:
            trip.move = Move()
            trip.move.expect(target, {"id": trip.caller.id, "attempt": trip.attempt, "tokens": tokens}, room)

    def _known(self, desk: Desk) -> list[int]:
        """Tokens of the requests that wait there for memory."""
        return [self._trips[name].caller.known for name in desk.state.get("waiting", ()) if name in self._trips]

    def _part(self, trip: Trip) -> None:
        """Nobody keeps room for a request any more: its prompt goes on, and then whoever has room takes it over."""
        assert trip.move is not None
        order = {"id": trip.caller.id, "attempt": trip.attempt}
        if trip.move.target in self.desks:
            trip.move.target.tell({"do": "cancel"} | order)
        trip.move.end(State.RELEASED)
        trip.move = None
        trip.desk.tell({"do": "keep"} | order)

    def _hear_piece(self, trip: Trip, desk: Desk, event: Message) -> None:
        if desk is trip.desk and trip.move is not None and trip.move.pushed:
            trip.move.pass_on(event)

    def _hear_landed(self, trip: Trip, desk: Desk, event: Message) -> None:
        if trip.move is None or desk is not trip.move.target:
            return
        copied = [trip.move.pieces.pop(number, None) for number in event["pieces"]]
        if trip.desk in self.desks:
            trip.desk.tell({"do": "release"} | {key: event[key] for key in ("id", "attempt", "pieces")})
        else:  # it is dead, and cannot free them
            for parcel in filter(None, copied):
                self.crew.depot.drop(parcel)

    def _hear_full(self, trip: Trip, desk: Desk, event: Message) -> None:
        if trip.move is None or desk is not trip.move.target:
            return
        if trip.computing and trip.move.deadline == math.inf:
            self._part(trip)
        else:
            self._restart(trip, "there was no room for it")

    # ---- moving
    def _hand_over(self) -> None:
        """Tell workers with room to take what waits in the depot, first come first served."""
        waits = [t for t in self._trips.values() if t.move is not None and t.move.state is State.RESERVED]
        ready = [trip for trip in waits if trip.move is not None and trip.move.offer is not None]
        for trip in sorted(ready, key=lambda trip: trip.caller.trace.arrived):
            assert trip.move is not None
            seats = [desk for desk in self.desks if has_room(desk, self.fronts[-1].parts, trip.move.n_bytes)]
            weigh(self.desks, self._trips.values())
            target = self.policy.go_on(trip.caller.known, seats)
            if target is None:
                for later in reversed(self._trips.values()):
                    if later.move is not None and later.move.pushed and later.move.state is State.RESERVED:
                        self._part(later)  # what is done goes before what has not begun
                        break
                return
            trip.move.send(target, self.clock() + self.patience.move)

    def _chase(self) -> None:
        """Moves: what was delivered, what is overdue, and a new lease for what waits."""
        now = self.clock()
        waiting: dict[Desk, list[str]] = {}
        for trip in list(self._trips.values()):
            if trip.move is None:
                continue
            if trip.move.overdue(now):
                self._restart(trip, f"nothing was heard of its hand-off within {self.patience.move} s")
                continue
            waiting.setdefault(trip.desk, []).append(trip.caller.id)
            if trip.move.pushed and trip.move.target is not None:
                waiting.setdefault(trip.move.target, []).append(trip.caller.id)
        if now - self._renewed > LEASE / 4:
            self._renewed = now
            for desk in self.desks:
                if desk in waiting or not desk.quiet:  # or what it was told last is lost
                    desk.tell({"do": "renew", "ids": waiting.get(desk, [])})

    # ---- the dead
    def _lose(self, desk: Desk, why: str) -> None:
        """Replace a worker and start its requests again elsewhere. What it put into the depot is still there."""
        self.staff.replace(desk, why)
        for trip in list(self._trips.values()):
            move = trip.move
            if move is None:
                lost = trip.desk is desk and not trip.held
            else:
                lost = move.target is desk or (trip.desk is desk and move.offer is None)
            if lost:
                self._restart(trip, f"worker {desk.name} was lost ({why})")
        moves = [trip.move for trip in self._trips.values() if trip.move is not None]
        self.crew.depot.clear(desk.name, [parcel for move in moves for parcel in move.parcels])

    def _leave(self, trip: Trip, left: Left) -> None:
        caller = trip.caller
        del self._trips[caller.id]
        caller.left = left
        caller.trace.left = self.clock()
        self._progressed[caller] = None
