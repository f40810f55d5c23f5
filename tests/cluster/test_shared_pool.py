"""Two processes on one KV pool: colocated's tokens, no copy, one budget, whoever is killed whenever, and cores that
really move."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from phasewise.builder import build
from phasewise.cluster.engine_spec import EngineSpec
from phasewise.cluster.handle import WorkerHandle
from phasewise.cluster.process import ProcessLauncher
from phasewise.cluster.router import Router
from phasewise.cluster.shared_pool import SharedPool
from phasewise.cluster.transfer_buffer import folder
from phasewise.engine.limits import Limits
from phasewise.kv.handoff import State
from phasewise.request.request import Request
from tests import tiny
from tests.cluster.processes import go_on, kill, stop

PROMPTS = tiny.prompts(40, 90, 5, 64, 33, 120)
SLAB = 64 * tiny.engine().store.row_bytes
PATIENCE = 240.0  # seconds; machines may be busy


def started(knobs: str = "", slabs: int = 24, **limits: object) -> Router:
    given = Limits(**{"kv_bytes": slabs * SLAB, "cluster": "processes", **limits})
    placed = build(EngineSpec(str(tiny.checkpoint()), given, verbs={"place": "semi_pd" + knobs})).build()
    assert isinstance(placed, Router)
    return placed


def ended(placed: Router) -> None:
    """Close it; nothing of it may stay behind."""
    run = launcher(placed).run
    placed.close()
    assert not list(folder().glob(f"{run}*"))


@pytest.fixture(scope="module")
def standing() -> Iterator[list[Router]]:
    """The placement that tests share, once there is one."""
    found: list[Router] = []
    yield found
    for placed in found:
        ended(placed)


@pytest.fixture
def shared(standing: list[Router]) -> Router:
    """The shared placement; a new one if the test before has failed and left work or the dead in it."""
    if standing and not (standing[0].idle and standing[0].supervisor.ready and not files(standing[0])):
        ended(standing.pop())
    if not standing:
        standing.append(started(prefix_cache=False))
    return standing[0]


def launcher(placed: Router) -> ProcessLauncher:
    assert isinstance(placed.launcher, ProcessLauncher)
    return placed.launcher


def pool(placed: Router) -> SharedPool:
    found = launcher(placed)._pool
    assert found is not None
    return found


def handle(placed: Router, role: str) -> WorkerHandle:
    return next(handle for handle in placed.handles if handle.role == role)


def files(placed: Router) -> dict[int, int]:
    """{inode: bytes} of all planes in shared memory."""
    found = {}
    for path in folder().glob(f"{launcher(placed).run}.kv.*"):
        try:
            stat = path.stat()
        except FileNotFoundError:
            continue
        found[stat.st_ino] = stat.st_blocks * 512
    return found


def until(placed: Router, done: Callable[[], bool]) -> None:
    """Step until it is so; the budget must hold all the while."""
    end, table = time.monotonic() + PATIENCE, pool(placed).table
    while not done():
        placed.step()
        assert table.used <= table.limit and table.peak <= table.limit
        assert time.monotonic() < end, f"no end: {list(placed.flights.values())}"


def wanted(n: int) -> list[list[int]]:
    return tiny.plain(PROMPTS, tiny.greedy(n))


def start(placed: Router, n: int) -> list[Request]:
    requests = [Request(prompt, tiny.greedy(n)) for prompt in PROMPTS]
    for request in requests:
        placed.add(request)
    return requests


def finish(placed: Router, requests: list[Request]) -> None:
    """All leave, and then nothing is left of them anywhere."""
    until(placed, lambda: all(request.left is not None for request in requests))
    until(placed, lambda: placed.idle and placed.supervisor.ready)
    placed.forget_prefixes()
    until(placed, lambda: placed.idle and placed.supervisor.ready and placed.kv_bytes == 0)
    assert pool(placed).table.used == 0 and not files(placed)
    run = launcher(placed).run
    assert [path.name for path in folder().glob(f"{run}*")] == [f"{run}.pool"]


# ---- no copy, one budget
def test_colocateds_tokens_and_no_copy(shared: Router) -> None:
    before = shared.counters
    requests = start(shared, 9)
    finish(shared, requests)
    assert tiny.outs(requests) == wanted(9)
    done = shared.counters - before
    assert done.handoffs == len(PROMPTS) and done.recomputed == 0
    assert done.kv_bytes_moved == done.kv_bytes_sent == 0


def on_both_sides(shared: Router) -> set[int]:
    """Inodes of files that a request's prefill worker had and its decode worker had then, as far as looks between steps
    have met them."""
    run, seen = launcher(shared).run, {"prefill": set[int](), "decode": set[int]()}
    requests = start(shared, 20)
    while not all(request.left for request in requests):
        shared.step()
        for role in seen:
            for path in folder().glob(f"{run}.kv.{role}-*"):
                try:
                    seen[role].add(path.stat().st_ino)
                except FileNotFoundError:
                    continue
    finish(shared, requests)
    return seen["prefill"] & seen["decode"]


def test_files_change_their_name_only(shared: Router) -> None:
    """What decode has is what prefill had made: the same inodes. Beside busy cores a prompt may come and go between two
    looks, so it is asked up to twenty times; files that were copied would never be met on both sides."""
    assert any(on_both_sides(shared) for _ in range(20))


def test_a_pool_too_small_for_all_is_shared_by_both() -> None:
    placed = started(slabs=10)
    try:
        requests = start(placed, 100)
        table, layers = pool(placed).table, 4
        decode, most, largest = 0, 0, 4 * SLAB // layers
        while not all(request.left for request in requests):
            placed.step()
            decode = max(decode, table.owned(handle(placed, "decode").name))
            most = max(most, sum(files(placed).values()))
        finish(placed, requests)
        assert tiny.outs(requests) == wanted(100)
        assert decode > 5 * SLAB, "one side alone has had more than half of it"
        assert table.peak <= table.limit
        assert most <= table.limit + 2 * largest  # each worker may be moving a layer's rows to a larger buffer
    finally:
        placed.close()


# ---- killed in any state
def stopped(placed: Router) -> Iterator[None]:
    """Whoever decodes does not move; it must not hold the pool's lock meanwhile, or nobody moves."""
    decode = handle(placed, "decode").connection.pid
    with pool(placed).table.lock:
        stop(decode)
    yield
    go_on(decode)


def computing(placed: Router, requests: list[Request]) -> Iterator[None]:
    """Prompts are on their way to the first worker, or computed there."""
    yield


def reserved(placed: Router, requests: list[Request]) -> Iterator[None]:
    """A prompt's KV is lent to nobody yet."""
    placed.policy.go_on = lambda tokens, views: None
    until(placed, lambda: any(moving(placed, State.RESERVED)))
    del placed.policy.go_on
    yield


def sending(placed: Router, requests: list[Request]) -> Iterator[None]:
    """Somebody was told to take it, and does not answer."""
    pause = stopped(placed)
    next(pause)
    until(placed, lambda: any(moving(placed, State.SENDING)))
    yield
    next(pause, None)


def taking(placed: Router, requests: list[Request]) -> Iterator[None]:
    """Somebody was told to take it, and may be right at it."""
    until(placed, lambda: any(moving(placed, State.SENDING)))
    yield


def owned(placed: Router, requests: list[Request]) -> Iterator[None]:
    """Decoding is under way."""
    until(placed, lambda: any(request.n_out > 2 for request in requests))
    yield


def moving(placed: Router, state: State) -> Iterator[bool]:
    for flight in placed.flights.values():
        if flight.transfer is not None and flight.transfer.offer is not None:
            yield flight.transfer.state is state


@pytest.mark.parametrize(
    ("moment", "role"),
    [(computing, "prefill"), (reserved, "prefill"), (sending, "decode"), (taking, "decode"), (owned, "decode")],
)
def test_killed_in_any_state(shared: Router, moment: Callable[..., Iterator[None]], role: str) -> None:
    before = shared.counters
    requests = start(shared, 9)  # no request outgrows its first buffers
    state = moment(shared, requests)
    next(state)
    kill(handle(shared, role).connection.pid)
    until(shared, lambda: (shared.counters - before).workers_lost == 1)  # or others go on and hand over to the dead
    next(state, None)
    finish(shared, requests)
    assert tiny.outs(requests) == wanted(9)
    done = shared.counters - before
    assert done.workers_lost == 1 and done.kv_bytes_moved == 0


def test_killed_again_and_again(shared: Router) -> None:
    before, requests = shared.counters, start(shared, 40)
    for i in range(6):
        until(shared, lambda goal=10 * i: sum(r.n_out for r in requests) > goal and shared.supervisor.ready)
        kill(shared.handles[i % 2].connection.pid)
        until(shared, lambda lost=i + 1: (shared.counters - before).workers_lost == lost)  # or the dead are killed
    finish(shared, requests)
    assert tiny.outs(requests) == wanted(40)
    assert (shared.counters - before).workers_lost == 6


# ---- cores
def allowed(placed: Router, role: str) -> list[set[int]]:
    """The cores of every thread of a worker."""
    pid = handle(placed, role).connection.pid
    return [os.sched_getaffinity(int(task)) for task in os.listdir(f"/proc/{pid}/task")]


def listed(placed: Router, role: str) -> str:
    status = Path(f"/proc/{handle(placed, role).connection.pid}/status").read_text()
    return next(line.split()[1] for line in status.splitlines() if line.startswith("Cpus_allowed_list"))


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_cores_follow_the_load() -> None:
    """First prompts come that cannot meet their target, then tokens that cannot meet theirs; the other target is met
    always, however fast the machine is."""
    a, b = sorted(os.sched_getaffinity(0))[:2]
    placed = started(":cores=2,slo_ttft=1e-6,slo_tpot=1000,window=1,dwell=1", prefix_cache=False)
    try:
        assert (listed(placed, "prefill"), listed(placed, "decode")) == (str(a), str(b))
        both = f"{a}-{b}" if b == a + 1 else f"{a},{b}"
        prompts: list[Request] = []

        def fed() -> bool:
            while sum(request.left is None for request in prompts) < 8:
                prompts.append(Request(PROMPTS[len(prompts) % 6], tiny.greedy(1)))
                placed.add(prompts[-1])
            return listed(placed, "prefill") == both

        until(placed, fed)
        assert listed(placed, "decode") == str(b)
        until(placed, lambda: all(cores == {a, b} for cores in allowed(placed, "prefill")))  # once it has heard
        finish(placed, prompts)

        shares = placed.policy.shares
        shares.goals = replace(shares.goals, ttft=1000.0, tpot=1e-6)
        tokens: list[Request] = []

        def spoken() -> bool:
            while sum(request.left is None for request in tokens) < 3:
                tokens.append(Request(PROMPTS[2], tiny.greedy(150)))
                placed.add(tokens[-1])
            return listed(placed, "decode") == both

        until(placed, spoken)
        until(placed, lambda: listed(placed, "prefill") == str(a))
        until(placed, lambda: all(cores == {a, b} for cores in allowed(placed, "decode")))
        until(placed, lambda: all(cores == {a} for cores in allowed(placed, "prefill")))
        finish(placed, tokens)
        assert shares.moves == 3
        want = tiny.plain([PROMPTS[2]], tiny.greedy(150))[0]
        assert all(request.out == want for request in tokens)
    finally:
        placed.close()
