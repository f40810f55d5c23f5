"""A placement in virtual time: the real router and its policy over simulated workers, connections and links.

    placing.build(SimulatedPlan) -> Router(SimulatedLauncher, policy, fronts, the loop's clock)
    a worker has news -> Router.react -> commands -> SimulatedWorker.obey -> steps -> news

What would be read from a socket is handed over here: the router hears a worker as soon as it has news, and everybody
now and then while requests are under way, so that what is overdue is given up as it would be.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, cast

from phasewise.child import Message
from phasewise.cluster.handle import WorkerHandle
from phasewise.cluster.launcher import Connection, WorkerSpec
from phasewise.cluster.ownership import OwnershipBuffer
from phasewise.cluster.policy import Adjusting, Policy
from phasewise.cluster.router import Router
from phasewise.cluster.shared_pool import SharedPool
from phasewise.cluster.transfer_buffer import TransferBuffer
from phasewise.errors import UserError
from phasewise.kv.buffer import Ledger
from phasewise.plan.beside import Beside
from phasewise.plan.cost import Cost
from phasewise.plan.event_loop import EventLoop, Turn
from phasewise.plan.link import LOCAL, Link, Network
from phasewise.plan.sequence import SimulatedRequest, SimulatedSequence
from phasewise.plan.serving import Serving
from phasewise.plan.simulated_engine import EngineSettings, SimulatedEngine
from phasewise.plan.simulated_worker import SimulatedWorker
from phasewise.request.request import Departure
from phasewise.verbs.host import ENDLESS

ALONE = WorkerSpec("all", ("prefill", "decode"), 1.0)  # the engine of a placement without workers
GLANCES = 10  # times that the router looks round within the time that it waits for a hand-off


@dataclass(frozen=True)
class ClusterLayout:
    """The parts of a cluster. `cost` is that of a role with so many threads (None: all there are), `budget` the
    bytes of KV of a worker; `revive`: seconds until a dead worker's successor is there; `beside`: how workers of so
    many threads slow each other down, `shared`: on the same cores; `served`: what a server adds to steps."""

    engine: EngineSettings
    cost: Callable[[str, int | None], Cost]
    budget: Callable[[WorkerSpec], int]
    link: Link = LOCAL
    revive: float = 1.0
    beside: Callable[[int | None], Beside] = lambda threads: {}
    shared: Callable[[int | None], Beside] = lambda threads: {}
    served: Serving = field(default_factory=Serving)
    stages: Callable[[str], int] | None = None  # of a role's workers; None: those of `engine`

    def settings(self, role: str) -> EngineSettings:
        """What the engines of a role's workers are made with."""
        return self.engine if self.stages is None else replace(self.engine, stages=self.stages(role))


class SimulatedConnection:
    """A connection to a simulated worker: it obeys at once."""

    def __init__(self, worker: SimulatedWorker) -> None:
        self.worker, self.name = worker, worker.name

    @property
    def alive(self) -> bool:
        return self.worker.alive

    def tell(self, command: Message) -> None:
        if self.worker.alive:
            self.worker.obey(command)

    def hear(self) -> list[Message]:
        return self.worker.heard() or [{"event": "alive"}] * self.worker.ready

    def kill(self) -> None:
        self.worker.die()


class SimulatedBuffer:
    """The transfer buffer of workers whose KV is numbers: parcels are bytes that their workers account for."""

    def put(self, tensors: Sequence[Any]) -> Message:
        raise NotImplementedError("simulated workers have no tensors")

    def get(self, parcel: Message) -> list[Any]:
        raise NotImplementedError("simulated workers have no tensors")

    def drop(self, parcel: Message) -> None:
        pass

    def clear(self, owner: str, keep: Sequence[Message]) -> None:
        pass


class SimulatedLauncher:
    """A launcher in virtual time. `news` is told of each worker that has something to say; `every_token`: workers
    report each token in its step."""

    def __init__(
        self, layout: ClusterLayout, loop: EventLoop, news: Callable[[SimulatedWorker], None], every_token: bool
    ) -> None:
        self.layout, self.loop, self.every_token = layout, loop, every_token
        self.network = Network(layout.link)
        self.workers: list[SimulatedWorker] = []  # a successor takes the place of the dead
        self.retired: list[SimulatedWorker] = []
        self.opened = False  # the first workers are there; those that come later take their time
        self._changed: dict[SimulatedWorker, None] = {}  # whose state is another than the router has heard
        self._news = news
        self._launched = 0
        self._pool: SharedPool | None = None
        self._buffer: TransferBuffer = SimulatedBuffer()

    @property
    def transfer_buffer(self) -> TransferBuffer:
        return self._buffer

    def reserve(self, specs: Sequence[WorkerSpec]) -> None:
        pass

    def launch(self, name: str, spec: WorkerSpec) -> SimulatedConnection:
        ledger = self._ledger(name, spec)
        changed = None if spec is ALONE else self._changed
        worker = SimulatedWorker(name, spec, self.layout, ledger, self.loop, self.network, self._news, changed)
        worker.engine.every_token = self.every_token
        worker.others = self.workers
        worker.number = self._launched
        self._launched += 1
        self._seat(worker)
        if self.opened:
            self.loop.at(self.loop.now + self.layout.revive, Turn.END, worker.start)
        else:
            worker.start()
        return SimulatedConnection(worker)

    def _seat(self, worker: SimulatedWorker) -> None:
        """Give it the place of a dead worker of its kind, or one of its own."""
        for place, other in enumerate(self.workers):
            if not other.alive and other.spec == worker.spec:
                self.workers[place] = worker
                self.retired.append(other)
                return
        self.workers.append(worker)

    def _ledger(self, name: str, spec: WorkerSpec) -> Ledger:
        if not spec.pooled:
            return Ledger(self.layout.budget(spec))
        if self._pool is None:
            self._pool = SharedPool.here(self.layout.budget(spec))
            self._buffer = OwnershipBuffer(self._buffer, self._pool)
        return self._pool.account(name, spec.yields)

    def refresh(self) -> None:
        """The router hears the states that have changed. Those of workers with other news come with these."""
        for worker in self._changed:
            if not worker.said:
                worker.update()
        self._changed.clear()

    def retire(self, worker: SimulatedWorker) -> None:
        """The worker dies."""
        if worker.alive:
            worker.die()
            self._news(worker)

    def wait(self, connections: Sequence[Connection], seconds: float) -> None:
        pass  # news is handed over as it comes

    def close(self) -> None:
        pass


class Front:
    """Stands for an engine like the workers' before the router: it never runs, and knows what fits."""

    def __init__(self, engine: SimulatedEngine) -> None:
        self.parts, self.runtime, self._engine = engine, engine.runtime, engine
        self.model = SimpleNamespace(config=SimpleNamespace(max_positions=ENDLESS, eos=()))

    def check(self, request: SimulatedRequest, reach: int) -> None:
        self._engine.check(request.prompt_len, request.prompt_len + request.new)


class SimulatedPlan:
    """The plan that a placement builds from, in virtual time (`verbs.place.Plan`)."""

    def __init__(
        self, specs: Sequence[WorkerSpec], cores: Sequence[int], launcher: SimulatedLauncher, layout: ClusterLayout
    ) -> None:
        self.specs, self.cores, self.layout = specs, cores, layout
        self._launcher = launcher
        self.clock = lambda: launcher.loop.now

    def launcher(self) -> SimulatedLauncher:
        return self._launcher

    def engine(self, phases: tuple[str, ...], share: float, ledger: Ledger | None = None) -> Front:
        """An engine like those of the workers that run these phases, with the smallest budget among them."""
        alike = [spec for spec in self.specs if spec.phases == phases]
        budget = min(self.layout.budget(spec) for spec in alike)
        cost = self.layout.cost(alike[0].role, alike[0].n_threads)
        return Front(SimulatedEngine(self.layout.engine, cost, Ledger(budget), "decode" not in phases))


class SimulatedCluster:
    """A placement in virtual time. `over` is told of each request that leaves. `placing` is a method of the verb place;
    `policy` is what its router asks, None where all runs in one engine."""

    def __init__(
        self, layout: ClusterLayout, placing: Any, cores: Sequence[int], over: Callable[[SimulatedRequest], object]
    ) -> None:
        self.loop, self.over = EventLoop(), over
        policy = placing.policy(0.0, cores)
        self.launcher = SimulatedLauncher(layout, self.loop, self._news, isinstance(policy, Adjusting))
        self._routed = policy is not None
        self.router: Router | None = None
        self._handles: dict[str, WorkerHandle] = {}
        self._speaking: dict[SimulatedWorker, None] = {}
        self._watched = False  # whether the router looks round again
        self._requests: dict[str, SimulatedRequest] = {}  # where there is no router
        if policy is None:
            self.launcher.launch(ALONE.role, ALONE)
        else:
            plan = SimulatedPlan(policy.worker_specs(), cores, self.launcher, layout)
            self.router = placing.build(plan)
        self.launcher.opened = True

    @property
    def policy(self) -> Policy | None:
        return None if self.router is None else self.router.policy

    @property
    def workers(self) -> list[SimulatedWorker]:
        return self.launcher.workers

    @property
    def engines(self) -> list[SimulatedEngine]:
        """The engines of all workers, the dead included."""
        return [worker.engine for worker in (*self.launcher.retired, *self.launcher.workers)]

    def run(self) -> None:
        """Let everything happen."""
        self.loop.run()
        self.launcher.refresh()

    # ---- requests
    def add(self, request: SimulatedRequest) -> None:
        """A request arrives."""
        if self.router is None:
            self._requests[request.id] = request
            command = {"do": "add", "n": 0, "attempt": 0, "request": request.header(), "push": False}
            self.workers[0].obey(command)
            return
        try:
            self.launcher.refresh()
            self.router.add(cast(Any, request))
        except UserError as error:
            request.left = Departure("failed", str(error))
            self.over(request)
            return
        if not self._watched:
            self._watch_on(self.router)

    def kill(self, number: int) -> None:
        """A worker dies, by its place in the cluster."""
        self.launcher.retire(self.launcher.workers[number])

    # ---- news
    def _news(self, worker: SimulatedWorker) -> None:
        """A worker has something to say, or has died."""
        if not self._routed:
            self._hear(worker)
            return
        if not self._speaking:
            self.loop.soon(Turn.ROUTE, self._route)
        self._speaking[worker] = None

    def _route(self) -> None:
        assert self.router is not None
        speaking, self._speaking = self._speaking, {}
        self.launcher.refresh()
        workers = _in_order(speaking)
        written: list[SimulatedSequence] = []
        for worker in workers:
            if worker.written:
                written += worker.written
                worker.written = []
        self._tell(self.router.react([self._handle(worker) for worker in workers], cast(Any, written)))

    def _handle(self, worker: SimulatedWorker) -> WorkerHandle:
        assert self.router is not None
        if worker.name not in self._handles:
            self._handles = {handle.name: handle for handle in self.router.handles}
        return self._handles[worker.name]

    def _tell(self, progressed: Sequence[Any]) -> None:
        for request in progressed:
            if request.left is not None:
                self.over(request)

    def _hear(self, worker: SimulatedWorker) -> None:
        """Give the tokens of a placement without a router to those who asked."""
        for event in worker.heard():
            if event["event"] == "progress":
                request = self._requests[event["id"]]
                request.emit(event["tokens"], (), self.loop.now)
                if event["left"] is not None:
                    request.left = Departure(*event["left"])
                    del self._requests[request.id]
                    self.over(request)

    def _watch(self, router: Router) -> None:
        """Let the router look round as long as requests are under way."""
        self.launcher.refresh()
        self._tell(router.react())
        self._watched = False
        if router.flights:
            self._watch_on(router)

    def _watch_on(self, router: Router) -> None:
        self._watched = True
        self.loop.at(self.loop.now + router.timeouts.handoff / GLANCES, Turn.ROUTE, self._watch, router)


def _in_order(workers: dict[SimulatedWorker, None]) -> Sequence[SimulatedWorker]:
    """Workers in the order in which they were launched, as the router goes through them."""
    return list(workers) if len(workers) == 1 else sorted(workers, key=lambda worker: worker.number)
