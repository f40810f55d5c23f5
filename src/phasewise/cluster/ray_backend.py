"""Workers as actors of a Ray cluster: one process each, on whatever hosts there are.

    router (a Ray driver) --- calls and answers --- actor (ray_worker.py), actor, ...      KV: ray_buffer.py

The first workers share a placement group, a bundle of CPUs for each. A worker that died is replaced in its bundle; if
its host died, Ray moves the bundle to another host, and while none has room the new worker waits for one.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import tempfile
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from phasewise.child import Message
from phasewise.cluster.engine_spec import Build, EngineSpec
from phasewise.cluster.launcher import Connection, WorkerSpec
from phasewise.cluster.process import PULSE
from phasewise.cluster.ray_buffer import RayBuffer
from phasewise.cluster.ray_worker import RayWorker
from phasewise.errors import PhasewiseError, UserError

log = logging.getLogger(__name__)
SPACE = "phasewise"  # Ray's namespace
ROOM = 30.0  # seconds until the cluster must have room for the first workers
ANSWER = 3.0  # seconds for a cluster's address to answer
ALIVE: Message = {"event": "alive"}
REFUSALS = (RayError, OSError, RuntimeError, ValueError)  # what Ray raises instead of starting or joining
THREADS = 4  # of an actor: one hears, the others take commands
OWN = {"worker_niceness": 0}  # of a cluster of our own: Ray's 15 starves workers beside whatever else this host runs


@dataclass(frozen=True)
class RayPlacement:
    """The spread of workers over hosts: `strategy` is that of a Ray placement group; each gets `cpus` cores,
    None = as many as its placement says, which counts the cores of the router's host."""

    strategy: Literal["SPREAD", "PACK", "STRICT_SPREAD", "STRICT_PACK"] = "SPREAD"
    cpus: int | None = None

    def __post_init__(self) -> None:
        if self.cpus is not None and self.cpus < 1:
            raise UserError(f"cluster ray: cpus={self.cpus} must be at least 1")


class RayConnection:
    """The connection to an actor: every command is a call, and one call that asks for events is always under way."""

    def __init__(self, name: str, make: Callable[[], Any], views: WorkerGroup) -> None:
        self.name, self.alive = name, True
        self._make, self._views = make, views
        self._spoken = False
        self._unheard: list[Message] = []  # what it was told before its first word
        self._start()

    def _start(self) -> None:
        self.actor = self._make()
        self.poll = self.actor.hear.remote(0)
        self._told, self._asked = 0, time.monotonic()
        for command in self._unheard:
            self._send(command)

    def _send(self, command: Message) -> None:
        self.actor.tell.remote(self._told, command)
        self._told += 1

    def tell(self, command: Message) -> None:
        if not self.alive:
            return
        if not self._spoken:
            self._unheard.append(command)
        self._send(command)

    def hear(self) -> list[Message]:
        if self.poll is None:
            return []
        if not ray.wait([self.poll], timeout=0)[0]:
            return self._excuse()
        try:
            heard: list[Message] = ray.get(self.poll)
        except RayError as error:  # an exception of the worker itself is one, too
            return self._fail(error)
        self._spoken = True
        self._unheard.clear()
        self.poll = self.actor.hear.remote(self._told)
        return heard or [ALIVE]

    def _fail(self, error: RayError) -> list[Message]:
        """A worker is dead, unless it only was to start on a host that is."""
        if self.alive and not self._spoken and not self._views.placed:
            log.warning("worker %s starts again: %s", self.name, _reason(error))
            self._start()
            return [ALIVE]
        if self.alive:
            log.error("worker %s: %s", self.name, _reason(error))
        self.alive, self.poll = False, None
        return []

    def _excuse(self) -> list[Message]:
        """A worker that waits for a host cannot speak, and is not dead."""
        now = time.monotonic()
        if self._spoken or now - self._asked < PULSE:
            return []
        self._asked = now
        return [] if self._views.placed else [ALIVE]

    def kill(self) -> None:
        self.alive = False
        with contextlib.suppress(RayError, ValueError):
            ray.kill(self.actor)

    def close(self) -> None:
        """Kill it and listen no more: a question after Ray's shutdown would start another cluster."""
        if self.alive:
            self.kill()
        self.poll = None


class WorkerGroup:
    """The placement group of the workers that were launched first, one bundle for each; other workers go anywhere."""

    def __init__(self, specs: Sequence[WorkerSpec], strategy: str) -> None:
        """Raises UserError if the cluster has no room for them."""
        self._specs = list(specs)
        self._taken: list[RayConnection | None] = [None] * len(specs)
        self.group: PlacementGroup | None = None
        if not specs:
            return
        self.group = placement_group([{"CPU": cpus(spec)} for spec in specs], strategy=strategy)
        if not self.group.wait(ROOM):
            remove_placement_group(self.group)
            wanted = " + ".join(str(cpus(spec)) for spec in specs)
            free = ray.available_resources().get("CPU", 0.0)  # type: ignore[no-untyped-call]
            raise UserError(
                f"{len(specs)} workers with {wanted} CPUs ({strategy}) have no room in a cluster with {free:g} free "
                "ones: add nodes, or take fewer CPUs for each worker with --cluster ray:cpus=1"
            )

    @property
    def placed(self) -> bool:
        """Every bundle has a host."""
        return self.group is None or placement_group_table(self.group)["state"] == "CREATED"

    def options(self, spec: WorkerSpec) -> tuple[int | None, dict[str, Any]]:
        """The free bundle of a worker, and the options that put its actor there."""
        for i, (own, call) in enumerate(zip(self._specs, self._taken)):
            if self.group is not None and own == spec and (call is None or not call.alive):
                return i, {"scheduling_strategy": PlacementGroupSchedulingStrategy(self.group, i)}
        return None, {"scheduling_strategy": "SPREAD"}

    def take(self, bundle: int | None, call: RayConnection) -> None:
        if bundle is not None:
            self._taken[bundle] = call


class RayLauncher:
    """A launcher of actors. It joins a cluster when the first workers are reserved."""

    def __init__(self, spec: EngineSpec, build: Build, placement: RayPlacement = RayPlacement()) -> None:
        self.spec, self.build, self.placement = spec, build, placement
        self.transfer_buffer = RayBuffer()
        self._calls: list[RayConnection] = []
        self._views: WorkerGroup | None = None
        self._dismiss: weakref.finalize[..., RayLauncher] | None = None

    def reserve(self, specs: Sequence[WorkerSpec]) -> None:
        """Raises UserError if there is no cluster, no room in it, or if the workers cannot do without each other."""
        if any(spec.pooled for spec in specs):
            raise UserError("workers that share one KV pool run on one host: use --cluster processes, not ray")
        own = [self._fitted(spec) for spec in specs]
        connected = connect(sum(map(cpus, own)))
        try:
            self._views = WorkerGroup(own, self.placement.strategy)
        except BaseException:
            if connected:
                ray.shutdown()
            raise
        self._dismiss = weakref.finalize(self, _dismiss, self._calls, self._views, connected)  # once, at exit at last

    def launch(self, name: str, spec: WorkerSpec) -> RayConnection:
        if self._views is None:
            self.reserve([])
        assert self._views is not None and self._dismiss is not None
        if not self._dismiss.alive:
            raise PhasewiseError(f"worker {name} cannot be launched: all have been dismissed")
        own = self._fitted(spec)
        bundle, options = self._views.options(own)
        options |= {"num_cpus": cpus(own), "max_concurrency": THREADS}
        kind = ray.remote(RayWorker).options(**options)  # never restarted, no call made twice: the router sees to that
        call = RayConnection(name, lambda: kind.remote(self.spec.plain(), self.build, asdict(own)), self._views)
        self._views.take(bundle, call)
        self._calls[:] = [known for known in self._calls if known.alive] + [call]
        return call

    def _fitted(self, spec: WorkerSpec) -> WorkerSpec:
        return spec if self.placement.cpus is None else replace(spec, threads=self.placement.cpus)

    def wait(self, connections: Sequence[Connection], seconds: float) -> None:
        polls = [
            connection.poll
            for connection in connections
            if isinstance(connection, RayConnection) and connection.poll is not None
        ]
        if polls:
            ray.wait(polls, timeout=seconds)

    def close(self) -> None:
        if self._dismiss is not None:
            self._dismiss()


def _dismiss(calls: list[RayConnection], views: WorkerGroup, connected: bool) -> None:
    if not ray.is_initialized():
        return
    for call in calls:
        call.close()
    calls.clear()
    if views.group is not None:
        remove_placement_group(views.group)
    if connected:
        ray.shutdown()


def cpus(spec: WorkerSpec) -> int:
    return spec.threads or 1


def _reason(error: RayError) -> str:
    """Returns the error that the worker itself raised, or the first line of Ray's report of its death."""
    if isinstance(error, RayTaskError):
        return f"{type(error.cause).__name__}: {error.cause}"
    return str(error).strip().partition("\n")[0]


# ---- the cluster
def connect(needed: int) -> bool:
    """Join a Ray cluster: that of RAY_ADDRESS, else that of `ray start` on this host, else one of our own, which has
    `needed` CPUs at least and is seen from this host only. -> False if this process has joined one before.

    Raises UserError if the cluster does not answer or cannot be joined.
    """
    if ray.is_initialized():
        return False
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    options: dict[str, Any] = {"namespace": SPACE, "log_to_driver": False, "logging_level": "WARNING"}
    named = os.environ.get("RAY_ADDRESS")
    address = named or _started_here() or "local"
    if address != "local" and answers(address):
        try:
            ray.init(named or None, **options)  # what was started here Ray finds itself, and whether it wants a token
        except REFUSALS as error:
            hint = "" if "RAY_AUTH_MODE" in os.environ else ". If it asks for a token, set RAY_AUTH_MODE=token"
            raise UserError(f"the Ray cluster at {address} cannot be joined: {error}{hint}") from error
        return True
    if named not in (None, "", "local"):
        raise UserError(f"no Ray cluster answers at RAY_ADDRESS={named}: run `ray start --head` there, or unset it")
    if address != "local":
        log.warning("the Ray cluster started at %s no longer answers: starting one for this process", address)
    here = max(needed, os.cpu_count() or 1)
    try:
        ray.init(
            "local", num_cpus=here, include_dashboard=False, _node_ip_address="127.0.0.1", _system_config=OWN, **options
        )
    except REFUSALS as error:
        raise UserError(f"Ray cannot be started on this host: {error}") from error
    return True


def _started_here() -> str | None:
    """The address that `ray start` has left on this host. Ray's "auto" would join other programs' own clusters, too."""
    note = Path(os.environ.get("RAY_TMPDIR", tempfile.gettempdir()), "ray", "ray_current_cluster")
    return note.read_text().strip() or None if note.exists() else None


def answers(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=ANSWER).close()
    except (OSError, ValueError):
        return False
    return True
