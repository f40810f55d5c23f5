"""Workers in processes of their own on this machine, forked from a nursery that has loaded the model once.

    router process --- socket --- nursery (loads the model with one thread, forks)
         |                           |
         +------- a socket pair -- worker, worker, ...        KV between them: files in shared memory (depot.py)

Forks share the weights, packed ones too, until the machine ends; a new worker is ready in milliseconds. A fork is safe
because the nursery is a fresh interpreter with a single thread, in which no parallel region has run.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import asdict
from multiprocessing import connection
from multiprocessing.connection import Connection
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, cast

from phasewise.cluster.depot import Depot, Segments, folder, sweep
from phasewise.cluster.lend import Lending
from phasewise.cluster.line import Line, Message, Spec
from phasewise.cluster.pool import Pool
from phasewise.cluster.source import Source
from phasewise.cluster.worker import Worker
from phasewise.errors import UserError

if TYPE_CHECKING:
    from phasewise.recipe import Builder

log = logging.getLogger(__name__)
PREFIX = "phasewise"
PULSE = 1.0  # seconds between two signs of life
QUIET = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}  # threads that wait leave the cores to other workers
STUCK = 0.002  # seconds between turns of a worker that waits for memory held elsewhere
GRACE = 2.0  # seconds that dismissed workers have to go by themselves


class Wire:
    """The line to a worker process. A thread writes, so that a worker that does not read never holds up the router."""

    def __init__(self, name: str, pid: int, conn: Connection) -> None:
        self.name, self.pid, self.conn = name, pid, conn
        self.alive = True
        self._process = os.pidfd_open(pid)
        self._queue: SimpleQueue[bytes | None] = SimpleQueue()
        threading.Thread(target=self._write, name=f"to {name}", daemon=True).start()

    def _write(self) -> None:
        while (message := self._queue.get()) is not None:
            try:
                self.conn.send_bytes(message)
            except OSError:
                return  # the reading side will notice

    def tell(self, command: Message) -> None:
        self._queue.put(json.dumps(command).encode())

    def hear(self) -> list[Message]:
        heard: list[Message] = []
        try:
            while self.alive and self.conn.poll(0):
                heard.append(json.loads(self.conn.recv_bytes()))
        except (EOFError, OSError):
            self.alive = False
            self._queue.put(None)
        return heard

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._process, signal.SIGKILL)
        connection.wait([self._process], GRACE)

    def close(self) -> None:
        """Hang up: the worker ends by itself, or is made to."""
        self._queue.put(None)
        with contextlib.suppress(OSError):  # unblocks a writer too
            socket.socket(fileno=os.dup(self.conn.fileno())).shutdown(socket.SHUT_RDWR)
        if not connection.wait([self._process], GRACE):
            self.kill()
        os.close(self._process)
        self.conn.close()


class Processes:
    """A crew of processes on this machine."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.run = f"{PREFIX}.{os.getpid()}.{secrets.token_hex(4)}"
        self.depot: Depot = Segments(self.run, "router")
        self._pool: Pool | None = None
        self._wires: list[Wire] = []
        self._nursery: tuple[subprocess.Popen[bytes], socket.socket] | None = None
        self._closed = False
        sweep_dead()
        self._final = weakref.finalize(self, _dismiss, self.run, self._wires)

    def reserve(self, specs: Sequence[Spec]) -> None:
        pass  # there is this machine only

    def hire(self, name: str, spec: Spec) -> Wire:
        if spec.pooled and self._pool is None:
            if self.source.device != "cpu":
                raise UserError(f"workers cannot share a pool on {self.source.device}: only on the CPU")
            self._pool = Pool.create(self.run, self.source.limits.budget)
            self.depot = Lending(self.depot, self._pool)
        for again in (False, True):
            ours, theirs = socket.socketpair()
            try:
                _, line = self._warm()
                text = json.dumps({"name": name, "spec": asdict(spec)}).encode()
                socket.send_fds(line, [text], [theirs.fileno()])
                pid = json.loads(line.recv(64) or b"null")
                if pid is None:
                    raise ConnectionError("the nursery is gone")
            except OSError as error:
                ours.close()
                self._nursery = None
                if again:
                    raise RuntimeError(f"worker {name} could not be started: {error}; see the log") from error
                continue
            finally:
                theirs.close()
            wire = Wire(name, pid, Connection(ours.detach()))
            self._wires.append(wire)
            return wire
        raise AssertionError

    def _warm(self) -> tuple[subprocess.Popen[bytes], socket.socket]:
        """The nursery, started now if there is none alive."""
        if self._nursery is None or self._nursery[0].poll() is not None:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                arguments = [json.dumps(self.source.plain()), self.run, str(theirs.fileno())]
                process = subprocess.Popen(
                    [sys.executable, "-m", "phasewise.cluster.process", *arguments],
                    pass_fds=[theirs.fileno()], env=os.environ | QUIET, stdin=subprocess.DEVNULL,
                )  # fmt: skip
            self._nursery = process, ours
        return self._nursery

    def wait(self, lines: Sequence[Line], seconds: float) -> None:
        connection.wait([line.conn for line in lines if isinstance(line, Wire) and line.alive], seconds)

    def close(self) -> None:
        if self._nursery is not None:
            process, line = self._nursery
            line.close()
            try:
                process.wait(GRACE)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            self._nursery = None
        self._final()


def _dismiss(run: str, wires: list[Wire]) -> None:
    for wire in wires:
        wire.close()
    wires.clear()
    sweep(run)


def sweep_dead() -> None:
    """Remove what servers that were killed have left in shared memory."""
    for path in folder().glob(f"{PREFIX}.*"):
        owner = path.name.split(".")[1]
        if owner.isdigit() and not os.path.exists(f"/proc/{owner}"):
            path.unlink(missing_ok=True)


# ---- in the nursery
def nursery(plain: str, run: str, fileno: int) -> None:
    """Load the model, then fork a worker for every message; ends when the router hangs up."""
    import torch

    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the router says when to end
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children are not waited for
    line = socket.socket(fileno=fileno)
    builder = Source.of(json.loads(plain)).build()
    builder.engine(("prefill", "decode"), 1.0)  # loads what the methods load, for all to share
    while True:
        text, files, _, _ = socket.recv_fds(line, 1 << 16, 1)
        if not text:
            return
        order = json.loads(text)
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                line.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                work(builder, order["name"], Spec.of(order["spec"]), Connection(files[0]), run)
                code = 0
            except BaseException:
                log.exception("worker %s failed", order["name"])
            finally:
                os._exit(code)
        os.close(files[0])
        line.send(json.dumps(pid).encode())


# ---- in a worker
def work(builder: Builder, name: str, spec: Spec, conn: Connection, run: str) -> None:
    """Obey and take turns until the router hangs up. Another thread says now and then that the process is alive."""
    commands: SimpleQueue[Message | None] = SimpleQueue()
    speaking = threading.Lock()

    def post(event: Message) -> None:
        with speaking:
            conn.send_bytes(json.dumps(event).encode())

    def listen() -> None:
        try:
            while True:
                commands.put(json.loads(conn.recv_bytes()))
        except (EOFError, OSError):
            commands.put(None)

    def pulse() -> None:
        while True:
            time.sleep(PULSE)
            try:
                post({"event": "alive"})
            except OSError:
                return

    settle(spec)
    account, depot = None, cast(Depot, Segments(run, name))
    if spec.pooled:
        pool = Pool.join(run, name)
        account, depot = pool.account(name, spec.yields), Lending(depot, pool)
    worker = Worker(builder.engine(spec.phases, spec.share, account), depot, post, settle=run_on)
    for target in (listen, pulse):
        threading.Thread(target=target, daemon=True).start()
    with contextlib.suppress(BrokenPipeError):  # the router has hung up
        serve(worker, commands)


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


def settle(spec: Spec) -> None:
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


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING, format="%(processName)s %(name)s: %(message)s")
    nursery(sys.argv[1], sys.argv[2], int(sys.argv[3]))
