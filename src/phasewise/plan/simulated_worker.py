"""A worker in virtual time: it obeys the router's commands and reports as `cluster.worker.Worker` does.

What differs is what cannot be in numbers alone. KV is a count of bytes, and a transfer takes the links' time. Messages
take no time, so nothing is lost and no lease ends. Tokens after the first are reported with the last one, or as last
words of a worker that dies; until then they stand in its state as `untold`. Who got some is in `written`, where the
router's policy follows each token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from phasewise.child import Message
from phasewise.cluster.launcher import WorkerSpec
from phasewise.cluster.ownership import OwnershipTransfer
from phasewise.cluster.pool import Account
from phasewise.errors import UserError
from phasewise.kv.buffer import rounded
from phasewise.plan.cost import Cost
from phasewise.plan.event_loop import EventLoop, Turn
from phasewise.plan.link import Network
from phasewise.plan.memory import RequestKV
from phasewise.plan.sequence import SimulatedSequence
from phasewise.plan.simulated_engine import SimulatedEngine

if TYPE_CHECKING:
    from phasewise.plan.simulated_cluster import ClusterLayout


@dataclass(slots=True, eq=False)
class SimulatedOffer:
    """A prompt computed here whose KV waits for another worker: bytes that count against the budget meanwhile."""

    attempt: int
    n_bytes: int


@dataclass(slots=True, eq=False)
class SimulatedPush:
    """A request whose KV leaves piece by piece: rows times layers that were sent, and bytes by piece that nobody is
    known to have taken."""

    attempt: int
    kv: RequestKV | None = None
    sent: int = 0
    count: int = 0
    pieces: dict[int, int] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class SimulatedArrival:
    """A request on its way here piece by piece, and the bytes that are kept for it."""

    attempt: int
    n_bytes: int


class SimulatedLender(OwnershipTransfer):
    """Hands requests on within a pool whose planes are numbers."""

    def __init__(self, engine: SimulatedEngine, account: Account) -> None:
        super().__init__(cast(Any, engine), account, cast(Any, None), cast(Any, None))
        self._engine, self._need = engine, engine.store.cost

    def _headroom(self) -> int:
        """As that of an engine with tensors, whose requests may be of several recipes."""
        if self.account.yields:
            return 0
        needs, grow, need = dict[int, int](), 0, self._need
        for job in self._engine.running:
            kv, rows = job.kv, max(1, job.rows)
            if kv is None:
                continue
            if (least := needs.get(rows)) is None:
                least = needs[rows] = need(rows)
            grow += least if rows <= kv.spare else max(least, kv.growth(rows))
        return grow + sum(need(job.known + 1) for job in self._engine.waiting[:1])

    def lend(self, job: SimulatedSequence) -> Message:
        """Give a request's KV up for another worker to take. Returns its parcel."""
        return {"rest": None, "loan": self.account.lend(cast(Any, job.kv))}

    def adopt(self, parcel: Message) -> None:
        """Answer for KV that another worker has given up."""
        self.account.adopt(parcel["loan"])


class SimulatedWorker:
    """Obeys, and takes turns whenever it can. What it says is in `said` until it is heard, and `news` is told of that.
    A worker whose state has changed is in `changed`, for the router to hear of that before it decides anything."""

    def __init__(
        self, name: str, spec: WorkerSpec, layout: ClusterLayout, ledger: Any, loop: EventLoop, network: Network,
        news: Callable[[SimulatedWorker], None], changed: dict[SimulatedWorker, None] | None,
    ) -> None:  # fmt: skip
        self.name, self.spec, self.layout, self.loop, self.network = name, spec, layout, loop, network
        self.news, self.changed = news, changed
        self.said: list[Message] = []  # events that nobody has heard yet
        self.written: list[SimulatedSequence] = []  # got further tokens, where the router's policy hears of each
        self.cores = spec.cores
        cost: Cost = layout.cost(spec.role, spec.n_threads)
        self.engine = SimulatedEngine(layout.settings(spec.role), cost, ledger, not spec.decodes)
        self.engine.served = layout.served
        self._settle(spec.n_threads)
        self.lender = SimulatedLender(self.engine, ledger) if isinstance(ledger, Account) else None
        self.engine.runs = self.engine.runs and self.lender is None  # which looks at the requests' room after each step
        self.number = 0  # in the order in which workers were launched
        self.others: Sequence[SimulatedWorker] = ()  # the workers of the cluster, itself among them
        self.alive, self.ready, self.stepping, self._due = True, False, False, False
        self.jobs: dict[str, SimulatedSequence] = {}
        self.offers: dict[str, SimulatedOffer] = {}
        self.pushes: dict[str, SimulatedPush] = {}
        self.inbox: dict[str, SimulatedArrival] = {}
        self._kept = 0  # bytes of the inbox
        self._coming: dict[str, Message] = {}  # to be taken over, and still on the link
        self.arrivals: dict[str, Message] = {}  # to be taken over, in order, once there is room
        self._pieces: list[Message] = []  # that have come while a step was under way
        self._untold = self._heard = 0  # tokens that the router does not know of; the number of the last command
        self._steps = {"steps": 0}
        self.state: Message = {
            "event": "state", "heard": 0, "counters": self._steps, "by_recipe": {}, "kv_bytes": 0, "prefix_bytes": 0,
            "free": 0, "running": 0, "wish": 0, "waiting": [], "arrivals": [], "unlearned": "", "untold": 0,
        }  # fmt: skip
        self._verbs: dict[str, Callable[[Message], None]] = {
            "add": self._add, "take": self._take, "expect": self._expect, "piece": self._piece,
            "release": self._release, "keep": self._keep, "cancel": self._cancel, "renew": lambda command: None,
            "forget": lambda command: self.engine.prefixes.clear(), "cores": self._move,
            "spare": lambda command: _shrink(self.engine, command["bytes"]),
        }  # fmt: skip
        self._report()

    def start(self) -> None:
        """It is there: say so, and begin."""
        if self.alive:
            self.ready = True
            self._post(self.state)
            self.wake()

    def die(self) -> None:
        """Stop at once. The tokens that have come of its steps are its last words."""
        self.engine.settle()
        for job in list(self.jobs.values()):
            if job.known > job.told:
                self._progress(job)
        self.alive = self.ready = False

    # ---- commands
    def obey(self, command: Message) -> None:
        self._heard = command["n"]
        self._verbs[command["do"]](command)
        if self.lender is not None:
            self.lender.balance()
        self._report()
        self.wake()

    def _add(self, command: Message) -> None:
        job = SimulatedSequence(command["request"]["source"], command["attempt"])
        self._drop(job.id, job.attempt)
        try:
            self.engine.add(job)
        except UserError as error:
            job.left = str(error)
            self._progress(job)
            return
        self.jobs[job.id] = job
        if command["push"]:
            job.departs = True
            self.pushes[job.id] = SimulatedPush(job.attempt)

    def _take(self, command: Message) -> None:
        self._drop(command["id"], command["attempt"] - 1)
        self._coming[command["id"]] = command
        parcel = command["parcel"]
        if self.lender is None:
            self._after_transfer(parcel, self._arrive, command)
        else:
            self._arrive(command)

    def _expect(self, command: Message) -> None:
        self._drop(command["id"], command["attempt"] - 1)
        engine, n_bytes = self.engine, self.engine.store.cost(command["tokens"])
        crowd = len(engine.running) + len(engine.waiting) + len(self.inbox)
        waiting = sum(engine.store.cost(job.known + 1) for job in engine.waiting)
        fits = crowd < engine.max_running and engine.store.room(n_bytes + waiting + engine.growth)
        if not fits or not engine.room.promise(n_bytes):
            self._post({"event": "full", "id": command["id"], "attempt": command["attempt"]})
            return
        self.inbox[command["id"]] = SimulatedArrival(command["attempt"], n_bytes)
        self._kept += n_bytes

    def _piece(self, command: Message) -> None:
        self._after_transfer(command["parcel"], self._arrive_piece, command)

    def _release(self, command: Message) -> None:
        numbers = command.get("pieces")
        if numbers is None:
            self._give_up(command["id"], command["attempt"])
        self._let_go(command["id"], command["attempt"], numbers)

    def _keep(self, command: Message) -> None:
        name, attempt = command["id"], command["attempt"]
        if name in self.pushes and self.pushes[name].attempt == attempt:
            self.engine.counters.push_fallbacks += 1
            self._let_go(name, attempt)
        job = self.jobs.get(name)
        if job is not None and job.attempt == attempt:
            self.engine.keep_local(job)

    def _cancel(self, command: Message) -> None:
        self._drop(command["id"], command["attempt"])

    def _move(self, command: Message) -> None:
        """Run on other cores from the next step on."""
        self.cores = tuple(command["cores"])
        self.engine.cost = self.layout.cost(self.spec.role, command["threads"])
        self._settle(command["threads"])

    def _settle(self, threads: int | None) -> None:
        self.engine.beside, self.engine.shared = self.layout.beside(threads), self.layout.shared(threads)

    def _drop(self, name: str, attempt: int) -> None:
        """Forget all about a request, up to this attempt at it."""
        self._give_up(name, attempt)
        self._let_go(name, attempt)
        if name in self.inbox and self.inbox[name].attempt <= attempt:
            self._unexpect(name)
        for taken in (self._coming, self.arrivals):
            if name in taken and taken[name]["attempt"] <= attempt:
                del taken[name]
        if name in self.jobs and self.jobs[name].attempt <= attempt:
            job = self.jobs.pop(name)
            self._untold -= job.known - job.told
            self.engine.drop(job)

    def _give_up(self, name: str, attempt: int) -> None:
        """An offer was taken, or nobody wants it any more."""
        if name in self.offers and self.offers[name].attempt <= attempt:
            self.engine.room.promise(-self.offers.pop(name).n_bytes)

    def _let_go(self, name: str, attempt: int, numbers: Sequence[int] | None = None) -> None:
        """These pieces, or all of a request, are out of its hands."""
        push = self.pushes.get(name)
        if push is None or push.attempt > attempt:
            return
        for number in list(push.pieces) if numbers is None else numbers:
            self.engine.room.promise(-push.pieces.pop(number, 0))
        if numbers is None:
            del self.pushes[name]

    def _unexpect(self, name: str) -> None:
        n_bytes = self.inbox.pop(name).n_bytes
        self._kept -= n_bytes
        self.engine.room.promise(-n_bytes)

    # ---- KV that comes
    def _after_transfer(self, parcel: Message, call: Callable[[Message], None], command: Message) -> None:
        """Call once a parcel has crossed the links."""
        there = self.network.send(parcel["from"], self.name, parcel["bytes"], self.loop.now)
        if there > self.loop.now:
            self.loop.at(there, Turn.END, call, command)
        else:
            call(command)

    def _arrive(self, command: Message) -> None:
        """All KV of a request is here, to be taken over between two steps."""
        if self.alive and self._coming.get(command["id"]) is command:
            del self._coming[command["id"]]
            self.arrivals[command["id"]] = command
            self._arrived()

    def _arrive_piece(self, command: Message) -> None:
        if self.alive:
            self._pieces.append(command)
            self._arrived()

    def _arrived(self) -> None:
        if not self.stepping:
            self._land()
        self._report()
        self.wake()

    def _land(self) -> None:
        """Lay down the pieces that are here, and take over whom there is room for, first come first served."""
        if self._pieces:
            pieces, self._pieces = self._pieces, []
            for command in pieces:
                self._lay(command)
        for name, command in list(self.arrivals.items()) if self.arrivals else ():
            if not self._has_room(command["room"]):
                return
            del self.arrivals[name]
            if self.lender is not None:
                self.lender.adopt(command["parcel"])
            self._own(command)

    def _lay(self, command: Message) -> None:
        coming = self.inbox.get(command["id"])
        if coming is None or coming.attempt != command["attempt"]:
            return  # called off
        if "packed" in command:
            self._unexpect(command["id"])
            self._own(command)
        else:
            answer = {"event": "landed", "id": command["id"], "attempt": coming.attempt}
            self._post(answer | {"pieces": [command["piece"]]})

    def _has_room(self, n_bytes: int) -> bool:
        """Requests that wait for memory go first, and those that run may grow a bit. What is lent needs no room."""
        engine = self.engine
        if not n_bytes and self.lender is not None:
            return self.lender.welcome()
        if engine.waiting or len(engine.running) + len(self.inbox) >= engine.max_running:
            return False
        return engine.store.room(n_bytes + engine.growth)

    def _own(self, command: Message) -> None:
        """Go on with a request whose KV is here."""
        packed, engine = command["packed"], self.engine
        job = SimulatedSequence(packed["source"], command["attempt"], packed["computed"])
        job.kv = RequestKV(engine.store, packed["cap"])
        job.kv.spare -= job.computed
        engine.resume(job)
        self.jobs[job.id] = job
        engine.counters.handoffs += 1
        self._post({"event": "owned", "id": job.id, "attempt": job.attempt, "seconds": 0.0})

    # ---- turns
    def wake(self) -> None:
        """Take a turn once all is known that happens at this moment, unless a step is under way."""
        if self.ready and not self.stepping and not self._due:
            self._due = True
            self.loop.soon(Turn.BEGIN, self._begin)

    def _begin(self) -> None:
        self._due = False
        if not self.ready or self.stepping:
            return
        if self.arrivals or self._pieces:
            self._land()
        engine = self.engine
        if engine.beside or self.cores is not None:
            self._look_round()
        begun = engine.begin(self.loop.now)
        if engine.failed:
            failed, engine.failed = engine.failed, []
            for job in failed:
                self._progress(job)
        if begun is not None:
            self.stepping = True
            following, over = begun
            if following < over:
                self.loop.at(following, Turn.END, self._next)
            self.loop.at(over, Turn.END, self._finish)

    def _next(self) -> None:
        """Its first stage is free, while later ones are not."""
        if self.alive:
            self.stepping = False
            self.wake()

    def _finish(self) -> None:
        if not self.alive:
            return
        engine = self.engine
        self.stepping = engine.free[0] > self.loop.now
        news = engine.finish(self.loop.now)
        self._untold += engine.gained
        for job in news:
            self._progress(job)
        if engine.written:
            self.written += engine.written
            self.news(self)
        if self.pushes and engine.advanced:
            self._push()
        if engine.departed:
            for job in list(engine.departed):
                self._offer(job)
        if self.lender is not None:
            self.lender.balance()
            for other in self.others:  # they may have waited for what it gave back
                other.wake()
        self._report()
        if self.loop.done and not self.stepping and not self._due:
            self._begin()
        else:
            self.wake()

    def _look_round(self) -> None:
        """Note who else is within a step: some on cores of the same machine, some on the very same cores."""
        mine, engine = set(self.cores or ()), self.engine
        engine.others, engine.sharers = [], []
        for other in self.others:
            if other is not self and other.stepping:
                apart = mine.isdisjoint(other.cores or ())
                (engine.others if apart else engine.sharers).append(other.engine.path)

    def _progress(self, job: SimulatedSequence) -> None:
        """Report the tokens that the router does not know of, and the end."""
        left = None
        if job.left is not None:
            left = ("finished" if job.left == "length" else "failed", job.left)
            self.jobs.pop(job.id, None)
            self._let_go(job.id, job.attempt)
        start, job.told = job.told, job.known
        self._untold -= job.known - start
        self._post({
            "event": "progress", "id": job.id, "attempt": job.attempt, "start": start,
            "tokens": range(start, job.known), "left": left, "queued": None, "recalled": 0, "cached": 0,
        })  # fmt: skip

    def _push(self) -> None:
        """Send on what the step has made final of prompts that are pushed, as far as the budget allows."""
        for name, push in self.pushes.items():
            job = self.jobs.get(name)
            if job is None or job.kv is None or job in self.engine.departed:
                continue
            there, n_bytes = self._unsent(job, push)
            if push.kv is not job.kv or n_bytes <= 0 or not self.engine.room.promise(n_bytes):
                continue
            push.sent = there
            push.pieces[push.count] = n_bytes
            self.engine.counters.kv_bytes_sent += n_bytes
            self._post({
                "event": "piece", "id": job.id, "attempt": job.attempt, "piece": push.count, "blocks": [],
                "parcel": {"from": self.name, "bytes": n_bytes},
            })  # fmt: skip
            push.count += 1

    def _unsent(self, job: SimulatedSequence, push: SimulatedPush) -> tuple[int, int]:
        """Rows times layers that have run so far, and the bytes of those that were not sent."""
        layers, row_bytes = self.layout.engine.layers, self.engine.row_bytes
        push.kv = push.kv or job.kv
        there = job.computed * layers + (job.slice or 0) * job.depth
        return there, there * row_bytes // layers - push.sent * row_bytes // layers

    def _offer(self, job: SimulatedSequence) -> None:
        """A prompt is done: its KV waits where another worker can take it at any time."""
        assert job.kv is not None
        del self.jobs[job.id]
        engine, push = self.engine, self.pushes.get(job.id)
        event: Message = {
            "event": "offer",
            "id": job.id,
            "attempt": job.attempt,
            "room": rounded(job.known) * engine.row_bytes,
        }
        event["packed"] = {"source": job, "computed": job.computed, "cap": rounded(job.known)}
        n_bytes = job.computed * engine.row_bytes
        if self.lender is not None:
            event["room"], n_bytes, event["packed"]["cap"] = 0, 0, job.kv.cap
            event["parcel"] = self.lender.lend(job)
            job.kv = None
        elif push is not None:
            event |= {"piece": push.count, "blocks": []}
            _, unsent = self._unsent(job, push)
            if push.kv is job.kv:
                n_bytes = unsent
            else:  # it was preempted: what was sent early does not count
                engine.counters.push_fallbacks += 1
                event["blocks"] = None
        engine.drop(job)
        engine.room.promised += n_bytes
        engine.ledger.add(n_bytes)
        engine.counters.kv_bytes_sent += n_bytes
        self.offers[job.id] = SimulatedOffer(job.attempt, n_bytes)
        self._post({"parcel": {"from": self.name, "bytes": n_bytes}} | event)

    # ---- numbers
    def _post(self, event: Message) -> None:
        self.said.append(event)
        if len(self.said) == 1:
            self.news(self)

    def _report(self) -> None:
        """Its state is another than before."""
        if self.changed is not None:
            self.changed[self] = None

    def heard(self) -> list[Message]:
        """The events that have come since."""
        found, self.said = self.said, []
        if found and self.changed is not None:
            self.update()  # its state comes after what has led to it
        return found

    def update(self) -> None:
        """Bring its state, which the router reads where it is, up to date."""
        state, engine = self.state, self.engine
        free = engine.ledger.free + self._kept  # which the router has promised
        if engine.store.tree is not None:
            state["prefix_bytes"] = prefix = engine.prefixes.bytes
            free += prefix
        state["free"] = free
        state["running"] = len(engine.running)
        state["untold"], state["heard"] = self._untold, self._heard
        if engine.waiting or state["waiting"]:
            state["waiting"] = [job.id for job in engine.waiting]
        if self.arrivals or state["arrivals"]:
            state["arrivals"] = list(self.arrivals)
        if self.lender is not None:
            state["wish"] = self.lender.account.wish
        self._steps["steps"] = engine.counters.steps


def _shrink(engine: SimulatedEngine, n_bytes: int) -> None:
    engine.prefixes.shrink(n_bytes)
