"""Placements whose workers are real processes: started, frozen, killed, and swept up after."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from phasewise.builder import build
from phasewise.cluster.engine_spec import EngineSpec
from phasewise.cluster.handle import WorkerHandle
from phasewise.cluster.process import ForkServer, ProcessLauncher
from phasewise.cluster.router import Router
from phasewise.cluster.supervisor import Timeouts
from phasewise.cluster.transfer_buffer import folder
from phasewise.engine.limits import Limits
from phasewise.request.counters import Counters
from phasewise.request.params import Params
from phasewise.request.request import Request
from tests import tiny
from tests.cluster.faulty import Fate, Faulty

PATIENCE = 240.0  # seconds for anything that must happen at all; machines may be busy
CALM = Timeouts(handoff=120.0, silence=120.0, start=120.0)  # nobody is taken for dead but the dead


def started(
    place: str, verbs: dict[str, str] | None = None, faults: tuple[Callable[[int], Fate], Sequence[str]] | None = None,
    **limits: object,
) -> Router:  # fmt: skip
    """Workers over the tiny model; with `faults`, a fate for each message of some kinds, over lines of that sort."""
    given = Limits(**{"kv_bytes": 64 << 20, "cluster": "processes", **limits})
    plan = build(EngineSpec(str(tiny.checkpoint()), given, verbs={"place": place, **(verbs or {})}))
    if faults is not None:
        launcher = Faulty(plan.launcher(), *faults)
        plan.launcher = lambda: launcher
    placed = plan.build()
    assert isinstance(placed, Router)
    placed.timeouts = CALM
    return placed


# ---- looking at a launcher
def launcher(placed: Router) -> ProcessLauncher:
    found = placed.launcher.launcher if isinstance(placed.launcher, Faulty) else placed.launcher
    assert isinstance(found, ProcessLauncher)
    return found


def fork_server(placed: Router) -> ForkServer:
    return launcher(placed)._fork_servers[-1]


def handle(placed: Router, role: str) -> WorkerHandle:
    return next(handle for handle in placed.handles if handle.role == role)


def pid(handle: WorkerHandle) -> int:
    """The process of a worker that has introduced itself."""
    found = handle.connection.pid
    assert isinstance(found, int)
    return found


def segments(placed: Router) -> list[str]:
    """What lies in the transfer buffer's folder."""
    return sorted(path.name for path in folder().glob(f"{launcher(placed).run}*"))


def lost_with(placed: Router, handle: WorkerHandle) -> list[Request]:
    """The requests that must start again if this worker dies now: those it computes, or is to take over. What it has
    put down for others is safe."""
    found = []
    for flight in placed.flights.values():
        move = flight.transfer
        sends = flight.handle is handle and (move is None or move.offer is None)
        if sends or (move is not None and move.target is handle):
            found.append(flight.caller)
    return found


# ---- processes
def state(process: int) -> str:
    """The letter that /proc has for it: R, S, T (stopped), Z (dead, and nobody has asked), ... or nothing."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def gone(process: int) -> bool:
    return state(process) in ("", "Z", "X")


def children(process: int) -> list[int]:
    """Its living children, the oldest first."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent, began = _parent(path)
        except (FileNotFoundError, ProcessLookupError):
            continue
        child = int(path.parent.name)
        if parent == process and not gone(child):
            found.append((began, child))
    return [child for _, child in sorted(found)]


def _parent(path: Path) -> tuple[int, int]:
    fields = path.read_text().rpartition(")")[2].split()
    return int(fields[1]), int(fields[19])


def eventually(done: Callable[[], bool], seconds: float = PATIENCE) -> None:
    """Return once it is so, without stepping anything."""
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end, "nothing comes of it"
        time.sleep(0.002)


def kill(process: int) -> None:
    os.kill(process, signal.SIGKILL)
    eventually(lambda: gone(process))


def stop(process: int) -> None:
    os.kill(process, signal.SIGSTOP)
    eventually(lambda: state(process) == "T" or gone(process))


def go_on(process: int) -> None:
    """Unless it is dead, and perhaps no longer there."""
    with suppress(ProcessLookupError):
        os.kill(process, signal.SIGCONT)


@contextmanager
def frozen(processes: Iterable[int]) -> Iterator[None]:
    """Those that live go on afterwards."""
    held = list(processes)
    try:
        for process in held:
            stop(process)
        yield
    finally:
        for process in held:
            go_on(process)


# ---- requests
class Order:
    """A request, and the stream that its caller saw."""

    def __init__(self, prompt: Sequence[int], params: Params) -> None:
        self.seen: list[int] = []
        self.request = Request(prompt, params, watch=self._see)

    def _see(self, token: int) -> bool:
        self.seen.append(token)
        return False

    @property
    def whole(self) -> bool:
        """Whether every token was given out once. An end token is not shown to the caller."""
        request = self.request
        stopped = request.left is not None and request.left.reason == "stop"
        return self.seen == request.out[: request.n_out - stopped]


def start(placed: Router, prompts: Sequence[Sequence[int]], params: Sequence[Params]) -> list[Order]:
    orders = [Order(prompt, each) for prompt, each in zip(prompts, params, strict=True)]
    for order in orders:
        placed.add(order.request)
    return orders


def until(placed: Router, done: Callable[[], bool]) -> None:
    """Step until it is so."""
    end = time.monotonic() + PATIENCE
    while not done():
        placed.step()
        assert time.monotonic() < end, f"no end: {list(placed.flights.values())}"


def finish(placed: Router, orders: Sequence[Order], before: Counters, leases: bool = False) -> Counters:
    """All leave; every token was given out once; and then nothing is left of them anywhere. -> what was done

    Where messages were lost, what they would have freed is held for its lease: that is waited for.
    """
    until(placed, lambda: all(order.request.left is not None for order in orders))
    assert all(order.whole for order in orders)
    until(placed, lambda: placed.idle and placed.supervisor.ready)
    placed.forget_prefixes()
    until(placed, lambda: placed.idle and placed.supervisor.ready and not (leases and placed.kv_bytes))
    assert placed.kv_bytes == 0 and segments(placed) == []
    done = placed.counters - before
    assert done.emitted == sum(order.request.n_out for order in orders)
    return done


def outs(orders: Sequence[Order]) -> list[list[int]]:
    return tiny.outs([order.request for order in orders])
