"""Workers in processes of their own on this machine, forked from a fork server that has loaded the model once.

    router process --- socket --- fork server (loads the model with one thread, forks)
         |                           |
         +------- a socket pair -- worker, worker, ...        KV: files in shared memory (transfer_buffer.py)

Forks share the weights, packed ones too, until the machine ends; a new worker is ready in milliseconds. A fork is safe
because the fork server is a fresh interpreter with a single thread, in which no parallel region has run.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pkgutil
import secrets
import select
import signal
import socket
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import asdict
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, cast

from phasewise.child import Channel, Child, Message, name_process
from phasewise.cluster.engine_spec import Build, EngineSpec
from phasewise.cluster.launcher import Connection, WorkerSpec
from phasewise.cluster.ownership import OwnershipBuffer
from phasewise.cluster.shared_pool import SharedPool
from phasewise.cluster.sockets import SocketConnection, commands, introduce
from phasewise.cluster.transfer_buffer import SharedMemoryBuffer, TransferBuffer, folder, sweep
from phasewise.cluster.worker import Worker
from phasewise.errors import UserError

if TYPE_CHECKING:
    from phasewise.verbs.place import PlacementPlan

log = logging.getLogger(__name__)
PREFIX = "phasewise"
PULSE = 1.0  # seconds between two signs of life
QUIET = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}  # threads that wait leave the cores to other workers
STUCK = 0.002  # seconds between turns of a worker that waits for memory held elsewhere
GRACE = 2.0  # seconds that dismissed workers have to go by themselves


class ForkServer:
    """A process that has loaded the model, or is about to, and forks workers."""

    def __init__(self, spec: EngineSpec, build: Build, run: str) -> None:
        maker = f"{build.__module__}:{build.__qualname__}"
        arguments = {"plain": spec.plain(), "build": maker, "run": run}
        self._child = Child("phasewise.cluster.process:fork_server", arguments, environment=QUIET, patience=0.0)
        self._loaded = False

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def alive(self) -> bool:
        return self._child.alive

    @property
    def busy(self) -> bool:
        """It is loading the model."""
        if not self._loaded:
            with contextlib.suppress(OSError, EOFError):
                self._loaded = bool(self._child.channel.receive(0.0))
        return not self._loaded and self.alive

    def fork(self, name: str, spec: WorkerSpec, sock: socket.socket) -> None:
        """Order a worker at the other end of `sock`. Raises OSError if nobody takes the order."""
        self._child.channel.send({"name": name, "spec": asdict(spec)}, [sock.fileno()])

    def hang_up(self) -> None:
        """It ends by itself."""
        self._child.channel.close()

    def kill(self) -> None:
        self._child.kill()

    def close(self, seconds: float) -> None:
        """See to it that the process is gone; after `seconds` with force."""
        self._child.close(seconds)


class ProcessLauncher:
    """A launcher of processes on this machine. Raises UserError where there is no such thing."""

    def __init__(self, spec: EngineSpec, build: Build) -> None:
        if not hasattr(os, "pidfd_open"):
            raise UserError("cluster processes needs Linux: use --cluster inline here")
        self.spec, self.build = spec, build
        self.run = f"{PREFIX}.{os.getpid()}.{secrets.token_hex(4)}"
        self.transfer_buffer: TransferBuffer = SharedMemoryBuffer(self.run, "router")
        self._pool: SharedPool | None = None
        self._sockets: list[SocketConnection] = []
        self._fork_servers: list[ForkServer] = []
        sweep_dead()
        self._final = weakref.finalize(self, _dismiss, os.getpid(), self.run, self._sockets, self._fork_servers)

    def reserve(self, specs: Sequence[WorkerSpec]) -> None:
        pass  # there is this machine only

    def launch(self, name: str, spec: WorkerSpec) -> SocketConnection:
        """Returns at once: the worker speaks when it is there, or the line breaks."""
        if spec.pooled and self._pool is None:
            if self.spec.device != "cpu":
                raise UserError(f"workers cannot share a pool on {self.spec.device}: only on the CPU")
            self._pool = SharedPool.create(self.run, self.spec.limits.budget)
            self.transfer_buffer = OwnershipBuffer(self.transfer_buffer, self._pool)
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                self._fork_server().fork(name, spec, theirs)
            except OSError:  # it died, or does not read
                self._fork_servers[-1].kill()
                with contextlib.suppress(OSError):
                    self._fork_server().fork(name, spec, theirs)
        self._sockets[:] = [each for each in self._sockets if each.open]
        self._sockets.append(SocketConnection(name, ours, self._fork_servers[-1]))
        return self._sockets[-1]

    def _fork_server(self) -> ForkServer:
        """The one that is alive, or a new one."""
        if not self._fork_servers or not self._fork_servers[-1].alive:
            self._fork_servers[:] = [ForkServer(self.spec, self.build, self.run)]
        return self._fork_servers[-1]

    def wait(self, connections: Sequence[Connection], seconds: float) -> None:
        sockets = {each.sock.fileno(): each for each in connections if isinstance(each, SocketConnection) and each.open}
        poll = select.poll()
        for file, each in sockets.items():
            poll.register(file, select.POLLIN | (select.POLLOUT if each.pending else 0))
        for file, _ in poll.poll(seconds * 1000):
            sockets[file].flush()

    def close(self) -> None:
        self._final()


def _dismiss(owner: int, run: str, sockets: list[SocketConnection], fork_servers: list[ForkServer]) -> None:
    if os.getpid() != owner:
        return  # a fork of the router's process ends
    leavers: list[ForkServer | SocketConnection] = [*fork_servers, *sockets]
    for leaver in leavers:
        leaver.hang_up()
    until = time.monotonic() + GRACE
    for leaver in reversed(leavers):
        leaver.close(max(0.0, until - time.monotonic()))
    sockets.clear()
    fork_servers.clear()
    sweep(run)


def sweep_dead() -> None:
    """Remove what servers that were killed have left in shared memory."""
    for path in folder().glob(f"{PREFIX}.*"):
        owner = path.name.split(".")[1]
        if owner.isdigit() and not os.path.exists(f"/proc/{owner}"):
            path.unlink(missing_ok=True)


# ---- in the fork server
def fork_server(channel: Channel, plain: dict[str, Any], build: str, run: str) -> None:
    """Load the model, then fork a worker for every message; ends when the router hangs up."""
    import torch

    logging.basicConfig(level=logging.WARNING, format="%(processName)s %(name)s: %(message)s")
    torch.set_num_threads(1)
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD):  # the router says when to end; nobody waits for us
        signal.signal(ignored, signal.SIG_IGN)
    plan: PlacementPlan = pkgutil.resolve_name(build)(EngineSpec.of(plain))
    plan.engine(("prefill", "decode"), 1.0)  # loads what the methods load, for all to share
    with contextlib.suppress(OSError, EOFError):
        channel.send({"loaded": True})
        while True:
            order, file = channel.receive(), channel.files.popleft()
            if os.fork() == 0:
                channel.close()
                born(plan, order, socket.socket(fileno=file), run)
            os.close(file)
    sweep(run)  # the router may have died


# ---- in a worker
def born(plan: PlacementPlan, order: Message, sock: socket.socket, run: str) -> None:
    """Be a worker to the end. Does not return."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    name_process(order["name"])
    code = 1
    try:
        work(plan, order["name"], WorkerSpec.of(order["spec"]), sock, run)
        code = 0
    except BaseException:
        log.exception("worker %s failed", order["name"])
    finally:
        os._exit(code)


def work(plan: PlacementPlan, name: str, spec: WorkerSpec, sock: socket.socket, run: str) -> None:
    """Obey and take turns until the router hangs up. Another thread says now and then that the process is alive."""
    queue: SimpleQueue[Message | None] = SimpleQueue()
    channel, segments = Channel(sock), SharedMemoryBuffer(run, name)

    def listen() -> None:
        for command in commands(channel):
            queue.put(command)
        segments.clear(name, [])  # the router is gone, and with it whoever could use what we have put down
        os._exit(0)

    def pulse() -> None:
        with contextlib.suppress(OSError):
            while True:
                time.sleep(PULSE)
                channel.send({"event": "alive"})

    with contextlib.suppress(BrokenPipeError):  # the router has hung up
        introduce(channel)
        settle(spec)
        account, transfer_buffer = None, cast(TransferBuffer, segments)
        if spec.pooled:
            pool = SharedPool.join(run, name)
            account, transfer_buffer = pool.account(name, spec.yields), OwnershipBuffer(transfer_buffer, pool)
        worker = Worker(plan.engine(spec.phases, spec.share, account), transfer_buffer, channel.send, settle=run_on)
        for target in (listen, pulse):
            threading.Thread(target=target, daemon=True).start()
        serve(worker, queue)


def serve(worker: Worker, commands: SimpleQueue[Message | None]) -> None:
    """Obey what has come, then take a turn; with nothing to do, wait for a command. Returns at a None."""
    moves = True
    while True:
        try:
            while True:
                wait = PULSE if worker.idle else 0.0 if moves else STUCK
                command = commands.get(timeout=wait) if wait else commands.get_nowait()
                if command is None:
                    return
                worker.obey(command)
                moves = True
        except Empty:
            pass
        moves = worker.turn()


def settle(spec: WorkerSpec) -> None:
    """Take the cores and threads of the spec."""
    run_on(spec.cores, spec.threads)


def run_on(cores: Sequence[int] | None, threads: int | None) -> None:
    """Run on these cores (None = as before) with so many threads, or one per core. Threads there are come along."""
    import torch

    if cores is not None:
        for thread in os.listdir("/proc/self/task"):
            with contextlib.suppress(ProcessLookupError):  # it has ended
                os.sched_setaffinity(int(thread), cores)
    torch.set_num_threads(threads or len(os.sched_getaffinity(0)))
