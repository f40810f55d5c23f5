"""Two Ray nodes on this machine, a placement over them, and what tests ask of both."""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.cluster_utils import Cluster

from phasewise.builder import build
from phasewise.cluster.engine_spec import EngineSpec
from phasewise.cluster.handle import WorkerHandle
from phasewise.cluster.router import Router
from phasewise.cluster.supervisor import Timeouts
from phasewise.engine.limits import Limits
from phasewise.request.params import Params
from phasewise.request.request import Request
from phasewise.verbs.place import Placed
from tests import tiny

MEMORY = 100 << 20  # bytes of the object store of a node
PLACE = "disaggregated:prefill=1,decode=2,deadline=60"
PROMPTS = tiny.prompts(
    40, 900, 5, 333, 64
)  # the KV of long ones goes through shared memory, that of short ones does not
CONTEXT = 8192  # room for answers that outlast whatever is done to their workers
SLOW = {"schedule": "sarathi:budget=16"}  # prompts take long enough to die in
HEALTH = {"health_check_period_ms": 500, "health_check_failure_threshold": 6, "health_check_initial_delay_ms": 0}
SYSTEM = HEALTH | {"worker_niceness": 0}  # Ray's 15: beside other tests, workers would hardly ever run
RECIPES = {"small": {"store": "int8"}, "long": {"evict": "streaming:sinks=2,window=30"}}
LONG = 300.0  # seconds for anything that must happen at all
HIDDEN = ("RAY_ADDRESS", "RAY_JOB_ID", "RAY_AUTH_MODE")  # of a Ray that this machine may run


def start(cluster: str = "ray", **verbs: str) -> Placed:
    limits = Limits(kv_bytes=64 << 20, cluster=cluster)
    spec = EngineSpec(
        str(tiny.checkpoint(context=CONTEXT)), limits, verbs={"place": PLACE, **SLOW, **verbs}, recipes=RECIPES
    )
    return build(spec).build()


def engine(options: dict[str, str] | None = None) -> Placed:
    """The same model in one engine, for the tokens that must come."""
    return tiny.engine(options, of=tiny.model(context=CONTEXT))


class Nodes:
    """A head with one CPU, where this process is a driver, and another node with two, which may be killed."""

    def __init__(self) -> None:
        self._cluster = Cluster()
        self._cluster.add_node(num_cpus=1, object_store_memory=MEMORY, include_dashboard=False, _system_config=SYSTEM)
        self.repair()
        ray.init(self._cluster.address, namespace="tests", log_to_driver=False)

    @property
    def names(self) -> list[str]:
        """The head first."""
        return [self._cluster.head_node.node_id, *(node.node_id for node in self._cluster.worker_nodes)]

    def kill(self) -> None:
        """All processes of the other node at once, without a word."""
        (node,) = self._cluster.worker_nodes
        self._cluster.remove_node(node, allow_graceful=False)

    def repair(self) -> None:
        """See to it that there are two."""
        if not self._cluster.worker_nodes:
            self._cluster.add_node(num_cpus=2, object_store_memory=MEMORY)

    def close(self) -> None:
        ray.shutdown()
        self._cluster.shutdown()


@contextlib.contextmanager
def two_nodes() -> Iterator[Nodes]:
    """They are seen from here only, and nothing is left of them: no process, file, variable or signal handler."""
    environment, handler = dict(os.environ), signal.getsignal(signal.SIGTERM)
    folder = tempfile.mkdtemp(prefix="pw", dir="/tmp")  # names of sockets must be short
    for name in HIDDEN:
        os.environ.pop(name, None)
    os.environ |= {"RAY_TMPDIR": folder, "RAY_USAGE_STATS_ENABLED": "0", "HOME": folder}
    nodes: Nodes | None = None
    try:
        nodes = Nodes()
        yield nodes
    finally:
        if nodes is not None:
            nodes.close()
        shutil.rmtree(folder, ignore_errors=True)
        signal.signal(signal.SIGTERM, handler)
        os.environ.clear()
        os.environ |= environment


class Stage:
    """One prefill worker and two decode workers, a CPU each. Ray seats the first worker where there is most room: the
    prefill worker and a decode worker are on the other node, and a decode worker is at the head."""

    def __init__(self, nodes: Nodes) -> None:
        self.nodes, self.baseline = nodes, references()
        router = start()
        assert isinstance(router, Router)
        self.router = router
        self.router.timeouts = Timeouts(handoff=60.0, silence=60.0, start=300.0)

    # ---- who is there
    @property
    def prefill(self) -> WorkerHandle:
        (handle,) = (handle for handle in self.router.handles if handle.role == "prefill")
        return handle

    @property
    def decoders(self) -> list[WorkerHandle]:
        return [handle for handle in self.router.handles if handle.role == "decode"]

    def away(self) -> list[WorkerHandle]:
        """The workers on the node that may be killed."""
        handles = [handle for handle in self.router.handles if node(handle) == self.nodes.names[1]]
        assert sorted(handle.role for handle in handles) == ["decode", "prefill"], "Ray seats workers otherwise"
        return handles

    def near(self) -> list[WorkerHandle]:
        """Those at the head."""
        away = self.away()
        return [handle for handle in self.router.handles if handle not in away]

    def holders(self) -> set[WorkerHandle]:
        """Who computes requests."""
        return {flight.handle for flight in self.router.flights.values()}

    # ---- what happens
    def start(self, params: Sequence[Params], recipes: Sequence[str] = ("",) * len(PROMPTS)) -> list[Request]:
        requests = [Request(prompt, p, recipe=name) for prompt, p, name in zip(PROMPTS, params, recipes)]
        for request in requests:
            self.router.add(request)
        return requests

    def until(self, done: Callable[[], bool], seconds: float = LONG) -> None:
        deadline = time.monotonic() + seconds
        while not done():
            assert time.monotonic() < deadline, "nothing comes of it"
            self.router.step()

    def finish(self, requests: Sequence[Request]) -> list[list[int]]:
        """What the requests give. Nothing may be left behind, neither KV nor references to objects."""
        placed = self.router
        self.until(lambda: all(request.left for request in requests) and placed.idle and placed.supervisor.ready)
        placed.forget_prefixes()
        self.until(lambda: placed.idle)
        assert placed.kv_bytes == 0
        self.until(lambda: self._own_references() <= self.baseline)
        self.until(lambda: not any(inside(handle, references) for handle in placed.handles))
        return tiny.outs(requests)

    def settled(self) -> bool:
        """Whether the next test may use it: all who were hired are well, with nothing to do and nothing left."""
        placed = self.router
        well = all(handle.connection.alive and handle.state for handle in placed.handles) and not placed._closed
        if not well or len(placed.handles) != 3 or not placed.idle:
            return False
        return placed.kv_bytes == 0 and self._own_references() <= self.baseline and len(self.nodes.names) == 2

    def _own_references(self) -> int:
        """Those of this process, but for the call that is under way to each worker."""
        return references() - sum(handle.connection.poll is not None for handle in self.router.handles)


# ---- processes
def inside(handle: WorkerHandle, ask: Callable[[Any], Any]) -> Any:
    """What a function says that is called in a worker's process."""
    return ray.get(handle.connection.actor.__ray_call__.remote(ask), timeout=LONG)


def pid(handle: WorkerHandle) -> int:
    return int(inside(handle, lambda actor: os.getpid()))


def node(handle: WorkerHandle) -> str:
    return str(inside(handle, lambda actor: ray.get_runtime_context().get_node_id()))


def references(actor: Any = None) -> int:
    """How many objects this process keeps alive."""
    gc.collect()  # exceptions that were caught hold their frames
    return len(ray._private.worker.global_worker.core_worker.get_all_reference_counts())


@contextlib.contextmanager
def frozen(process: int) -> Iterator[None]:
    os.kill(process, signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGCONT)


def within(done: Callable[[], bool], seconds: float = LONG) -> bool:
    """Whether it comes true."""
    deadline = time.monotonic() + seconds
    while not done():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def gone(process: int) -> bool:
    """Whether it ends."""
    return within(lambda: not os.path.exists(f"/proc/{process}"))


def processes_of(folder: str) -> list[str]:
    """Command lines of processes that name a folder."""
    return [words for _, words in processes() if folder in words]


def niceness(name: str) -> set[int]:
    """Of the processes whose command line begins with `name`."""
    found = set()
    for process, words in processes():
        with contextlib.suppress(ProcessLookupError):
            if words.startswith(name):
                found.add(os.getpriority(os.PRIO_PROCESS, process))
    return found


def processes() -> Iterator[tuple[int, str]]:
    """All there are, with their command lines."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has ended
            yield int(path.parent.name), path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
