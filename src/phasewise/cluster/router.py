"""An engine made of workers: the same verbs, wherever the workers run, and nothing lost when one of them dies.

    add -> policy.start -> worker (prompt, first token) -> offer -> policy.go_on -> another worker -> ... -> left
             \\__ a worker that also decodes keeps the request to its end
        policy.reserve_peer -> a peer keeps room -> pieces of the KV, while the prompt is computed -> ... -> left

The caller's request stays here; workers compute twins of it and report tokens. Whatever goes wrong with a worker or a
move has one answer: start again from the tokens the caller has, elsewhere. Draws depend on seed and position alone, so
the stream goes on with the tokens it would have had.
"""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from phasewise.child import Message
from phasewise.cluster.handle import WorkerHandle
from phasewise.cluster.handover import Handover
from phasewise.cluster.in_flight import InFlight
from phasewise.cluster.kv_affinity import KVAffinity
from phasewise.cluster.launcher import Launcher
from phasewise.cluster.policy import Adjusting, Caller, Pairing, Policy
from phasewise.cluster.recipe_update import RecipeUpdate, told
from phasewise.cluster.supervisor import Supervisor, Timeouts
from phasewise.engine.engine import Engine
from phasewise.engine.runtime import Runtime
from phasewise.errors import PhasewiseError, UserError
from phasewise.kv.handoff import State
from phasewise.request.counters import Counters
from phasewise.request.params import Params
from phasewise.request.pool import Pool
from phasewise.request.request import Departure, Request
from phasewise.request.score import Score

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
        self,
        launcher: Launcher,
        policy: Policy,
        fronts: Sequence[Engine],
        clock: Callable[[], float],
        timeouts: Timeouts,
    ) -> None:
        self.launcher, self.policy, self.fronts = launcher, policy, list(fronts)
        self._pushing = policy if isinstance(policy, Pairing) and policy.push else None
        self._adjusting = policy if isinstance(policy, Adjusting) else None
        self.clock, self.timeouts = clock, timeouts
        self.model = fronts[0].model
        self._emitted = self._restarts = 0
        self.flights: dict[str, InFlight] = {}  # by the request's id
        self._attempts, self._numbers = itertools.count(), itertools.count()
        self._suspects: dict[InFlight, None] = {}  # requests whose workers keep failing
        self._progressed: dict[Request, None] = {}  # ordered, each once
        self._closed = False
        self._recipe_update: RecipeUpdate = {}  # recipes that came later, which whoever is launched is told of
        self._unwanted: set[str] = set()  # recipes that go once their last request has left
        self.handover = Handover(self)
        self._affinity = KVAffinity()
        self._hears = {"progress": self._progress, **self.handover.hears}
        try:
            self.supervisor = Supervisor(launcher, policy.worker_specs(), clock)
            while not self.supervisor.ready:
                self.step()
        except BaseException:
            self.close()
            raise

    # ---- what users of an engine call
    @property
    def handles(self) -> list[WorkerHandle]:
        return self.supervisor.handles

    @property
    def counters(self) -> Counters:
        """The counters of all workers together, as far as reported; tokens as they were given to the callers."""
        done = self.supervisor.counters
        fallbacks = done.push_fallbacks + self.handover.unmet
        return replace(done, emitted=self._emitted, restarts=self._restarts, push_fallbacks=fallbacks)

    @property
    def workers(self) -> dict[str, int]:
        """The number of workers of each role that are alive and ready."""
        there = Counter({handle.role: 0 for handle in self.handles})
        there.update(handle.role for handle in self.handles if handle.connection.alive and handle.state)
        return dict(there)

    @property
    def by_role(self) -> dict[str, dict[str, int]]:
        return {role: done.as_dict() for role, done in self.supervisor.by_role.items()}

    @property
    def by_worker(self) -> dict[str, dict[str, int]]:
        return {handle.name: handle.state["counters"] for handle in self.handles if handle.state}

    @property
    def by_recipe(self) -> dict[str, dict[str, int]]:
        return {recipe: done.of_requests() for recipe, done in self.supervisor.by_recipe.items()}

    @property
    def idle(self) -> bool:
        """Nothing is under way, and every worker has answered what it was told."""
        return not self.flights and all(handle.quiet for handle in self.handles)

    @property
    def waiting(self) -> list[Request]:
        """Requests without KV so far, or again."""
        held = {name for handle in self.handles for name in handle.state.get("waiting", ())}
        return [flight.caller for name, flight in self.flights.items() if name in held]

    @property
    def running(self) -> list[Request]:
        """Requests with KV somewhere, or on the way."""
        held = set(self.waiting)
        return [flight.caller for flight in self.flights.values() if flight.caller not in held]

    @property
    def kv_bytes(self) -> int:
        return sum(handle.state.get("kv_bytes", 0) for handle in self.handles)

    @property
    def tiers(self) -> dict[str, float]:
        return {}

    @property
    def lora_bytes(self) -> int:
        return sum(handle.state.get("lora_bytes", 0) for handle in self.handles)

    @property
    def prefix_bytes(self) -> int:
        return sum(handle.state.get("prefix_bytes", 0) for handle in self.handles)

    def add(self, request: Request) -> None:
        """Send a request to the worker of its siblings, else to the one that the policy chooses."""
        if self._closed:
            raise PhasewiseError("the workers have been dismissed: nothing can be added after close()")
        if request.id in self.flights:
            raise UserError(f"a request with id {request.id!r} is already running: give each request its own id")
        self.check(request)
        request.trace.arrived = self.clock()
        parent = None if request.parent is None else self.flights.get(request.parent.id)
        if parent is not None and not parent.held and parent.computing:
            self._begin(self._flight(request, parent.handle), parent.caller)
        else:
            self._begin(self._flight(request, self._start_of(request)))

    def check(self, request: Request) -> None:
        for front in self.fronts:
            front.check(request, self.model.config.max_positions)

    def _flight(self, request: Request, handle: WorkerHandle) -> InFlight:
        flight = self.flights[request.id] = InFlight(request, handle, next(self._attempts), next(self._numbers))
        return flight

    def prepare(self, params: Params, recipe: str) -> None:
        self.fronts[0].prepare(params, recipe)

    def learn(self, recipes: Mapping[str, Mapping[str, Any]]) -> None:
        """Add recipes at every worker, and wait for all. If one worker cannot build them, none is used."""
        update = told(recipes)
        for front in self.fronts:
            front.learn(recipes)
        for handle in self.handles:
            handle.tell({"do": "learn", "recipes": update})
        until = self.clock() + self.timeouts.start
        for handle, number in [(handle, handle.told) for handle in self.handles]:
            while handle.state.get("heard", 0) < number:
                if self.clock() > until or not handle.connection.alive:
                    raise UserError(f"worker {handle.name} has died or does not answer")
                self.supervisor.wait(PAUSE)
                for each in self.handles:
                    self._hear(each)
            if handle.state["unlearned"]:
                raise UserError(f"worker {handle.name}: {handle.state['unlearned']}")
        self._recipe_update |= update

    def forget(self, recipes: Collection[str]) -> None:
        """See `Placed`."""
        self._unwanted |= set(recipes)
        self._let_go()

    def _let_go(self) -> None:
        """Forget recipes that are no longer wanted at every worker, once no request has them."""
        gone = self._unwanted.difference(flight.caller.recipe for flight in self.flights.values())
        if not gone:
            return
        self._unwanted -= gone
        for front in self.fronts:
            front.forget(gone)
        for handle in self.handles:
            handle.tell({"do": "unlearn", "recipes": sorted(gone)})
        self._recipe_update = {name: own for name, own in self._recipe_update.items() if name not in gone}

    def reach(self, recipe: str) -> int:
        """Texts beyond the context are for one engine alone."""
        return min(self.model.config.max_positions, self.fronts[0].reach(recipe))

    def cancel(self, request: Request) -> bool:
        flight = self.flights.get(request.id)
        if flight is None or flight.caller is not request:
            return False
        self._stop(flight)
        self._leave(flight, Departure("cancelled", "cancelled"))
        for handle in self.handles:
            self._hear(handle)  # workers in this thread have obeyed already
        return True

    def step(self) -> list[Request]:
        """Wait a moment for news, and act on it. Returns requests with tokens, or left.

        Raises NoWorkers when workers keep dying before they are ready.
        """
        self.supervisor.wait(PAUSE)
        return self.react()

    def react(self, speaking: Sequence[WorkerHandle] | None = None, counted: Sequence[Caller] = ()) -> list[Request]:
        """Hear these workers, replace the dead among them, and hand over what waits. Returns requests with tokens, or
        left. By default everybody is heard, and what is overdue is given up: `step` without its wait. `counted`: with
        tokens of which no event tells; the policy follows those too."""
        handles = list(self.handles) if speaking is None else speaking
        for handle in handles:
            self._hear(handle)
        for handle, why in self.supervisor.dead(handles, self.timeouts):
            self._hear(handle)
            self._lose(handle, why)
        if speaking is None:
            self.handover.check_timeouts()
        self._try_suspects()
        self.handover.hand_over()
        progressed, self._progressed = list(self._progressed), {}
        if self._adjusting is not None:
            callers = (flight.caller for flight in self.flights.values())
            followed = [*progressed, *counted] if counted else progressed
            for handle, command in self._adjusting.adjust(self.handles, followed, callers, self.clock()):
                handle.tell(command)
        return progressed

    def forget_prefixes(self) -> None:
        for handle in self.handles:
            handle.forget_prefixes()
            handle.tell({"do": "forget"})
            self._hear(handle)

    def close(self) -> None:
        """Dismiss all workers."""
        self._closed = True
        self.launcher.close()

    # ---- starting
    def _start_of(self, request: Request) -> WorkerHandle:
        """Choose the worker where a request starts; one that has emitted starts again where it can go on."""
        seated, shape = self.supervisor.seated, self.shape(request)
        for each in seated:
            each.shape = shape
        if not request.n_out:
            holder = self._affinity.find(request, self._runtime(request), seated)
            return self.policy.start(request.tokens, seated) if holder is None else holder
        handle = self.policy.go_on(request.known, [handle for handle in seated if handle.spec.decodes])
        assert handle is not None
        return handle

    def _runtime(self, request: Request) -> Runtime:
        """The methods that compute its prompt, as the workers have them."""
        return self.fronts[0].runtime(request)

    def shape(self, request: Request) -> bytes:
        """The key under which workers cache the request's prompt, empty where they do not: recipes that shape it alike
        have the same."""
        tree = self.fronts[0].runtime(request).store.tree
        return b"" if tree is None else tree.root.key

    def _begin(self, flight: InFlight, parent: Request | None = None) -> None:
        """Hand a request's tokens to its worker."""
        caller = flight.caller
        if self._pushing is not None and not caller.n_out:
            self.handover.reserve_peer(flight, self._pushing)
        command: Message = {"do": "add", "attempt": flight.attempt, "request": caller.header() | {"computed": 0}}
        command["push"] = flight.transfer is not None
        if parent is not None:
            command["parent"] = parent.id
        if shape := self.shape(caller):
            flight.handle.remember(caller.prompt, shape)
        self.note(flight)
        flight.handle.tell(command)

    def note(self, flight: InFlight) -> None:
        """Follow a request that has moved or grown: the load of its workers, and what the next step must look at."""
        flight.weigh()
        if flight.settled and flight.transfer is None:
            return  # it generates where it is, as before
        self.handover.follow(flight)
        flight.settled = not flight.departs and flight.tries < SUSPECT
        if flight.tries >= SUSPECT:
            self._suspects[flight] = None
        else:
            self._suspects.pop(flight, None)

    def restart(self, flight: InFlight, why: str) -> None:
        """The one answer to every failure: start again from the tokens."""
        log.warning("request %s starts again from its %d tokens: %s", flight.caller.id, flight.caller.known, why)
        self._stop(flight)
        flight.unload()
        flight.settled = flight.moved = False
        flight.attempt = next(self._attempts)
        if not flight.caller.n_out:
            flight.caller.computed = 0
        if flight.tries >= TRIES:
            self._leave(flight, Departure("failed", f"it was started {TRIES} times in vain, at last: {why}"))
            return
        flight.tries += 1
        self._restarts += 1
        flight.held = flight.tries >= SUSPECT
        if flight.held:
            self.note(flight)
        else:
            flight.handle = self._start_of(flight.caller)
            self._begin(flight)

    def _try_suspects(self) -> None:
        """Start the next of the requests whose workers keep failing, if no other of them is under way."""
        if self._suspects and all(flight.held for flight in self._suspects):
            suspect = min(self._suspects, key=lambda flight: flight.number)
            suspect.held = False
            suspect.handle = self._start_of(suspect.caller)
            self._begin(suspect)

    def _stop(self, flight: InFlight) -> None:
        """Tell everybody who holds something of a request to drop it."""
        gone = {"do": "cancel", "id": flight.caller.id, "attempt": flight.attempt}
        if flight.handle in self.handles:
            flight.handle.tell(gone)
        if flight.transfer is None:
            return
        target = flight.transfer.target
        flight.transfer.end(State.RELEASED)
        if target is not None and target in self.handles:
            target.tell(gone)
        for parcel in flight.transfer.parcels:  # its worker may be dead
            self.launcher.transfer_buffer.drop(parcel)
        flight.transfer = None

    # ---- hearing
    def _hear(self, handle: WorkerHandle) -> None:
        for event in self.supervisor.hear(handle):
            flight = self.flights.get(event["id"])
            if flight is not None and flight.attempt == event["attempt"]:
                self._hears[event["event"]](flight, handle, event)
                if flight.caller.left is None:
                    self.note(flight)
            elif event["event"] in _HOLDING or (event["event"] == "progress" and event["left"] is None):
                self._call_off(handle, event)

    def _progress(self, flight: InFlight, handle: WorkerHandle, event: Message) -> None:
        caller, move = flight.caller, flight.transfer
        if move is not None and handle is move.target:
            self.handover.own(flight, handle)
        elif handle is not flight.handle:
            return
        left = None if event["left"] is None else Departure(*event["left"])
        new, seen = event["tokens"], caller.known - event["start"]
        if seen > 0:
            new = new[seen:]
        if caller.trace.admitted is None and event["queued"] is not None:
            caller.trace.admitted = caller.trace.arrived + event["queued"]
            caller.trace.by["admitted"] = handle.name
        caller.recalled = max(caller.recalled, event["recalled"])
        caller.cached = max(caller.cached, event["cached"])
        try:
            for at, *plain in event.get("scores", ()):
                caller.scores.setdefault(at, Score.of(plain))
            if "pool" in event:
                upto, total = event["pool"]
                caller.pool = Pool(upto, torch.tensor(total))
            if new:
                caller.computed = caller.high_water = caller.known
                flight.tries = 1
                caller.trace.by.setdefault("first_token", handle.name)
                self._emitted += caller.emit(new, self.model.config.eos, self.clock())
                if groups := event.get("groups"):
                    caller.note_groups(groups)
                if caller.left is not None and left is None:
                    self._call_off(handle, event)
                left = caller.left or left
        except Exception as error:  # raised by the caller's own watch
            self._call_off(handle, event)
            left = Departure("failed", f"{type(error).__name__}: {error}")
        self._progressed[caller] = None
        if left is not None:
            if flight.transfer is not None:
                self._stop(flight)
            self._leave(flight, left)
        elif flight.departs:
            self.handover.set_out(flight)

    def _call_off(self, handle: WorkerHandle, event: Message) -> None:
        """A worker need not go on with what it has reported."""
        handle.tell({"do": "cancel", "id": event["id"], "attempt": event["attempt"]})

    # ---- the dead
    def _lose(self, handle: WorkerHandle, why: str) -> None:
        """Replace a worker and start its requests again elsewhere. What it put into the transfer buffer stays."""
        new = self.supervisor.replace(handle, why)
        if self._recipe_update:
            new.tell({"do": "learn", "recipes": self._recipe_update})
        for flight in list(self.flights.values()):
            move = flight.transfer
            if move is None:
                lost = flight.handle is handle and not flight.held
            else:
                lost = move.target is handle or (flight.handle is handle and move.offer is None)
            if lost:
                self.restart(flight, f"worker {handle.name} was lost ({why})")
        moves = [flight.transfer for flight in self.flights.values() if flight.transfer is not None]
        self.launcher.transfer_buffer.clear(handle.name, [parcel for move in moves for parcel in move.parcels])

    def _leave(self, flight: InFlight, left: Departure) -> None:
        caller = flight.caller
        del self.flights[caller.id]
        self._suspects.pop(flight, None)
        flight.unload()
        self.handover.forget(flight)
        if left.how == "finished":
            self._affinity.finished(caller, self._runtime(caller), flight.handle)
        caller.left = left
        caller.trace.left, caller.trace.by["left"] = self.clock(), flight.handle.name
        self._progressed[caller] = None
        if self._unwanted:
            self._let_go()
