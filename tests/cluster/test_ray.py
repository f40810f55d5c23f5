"""Workers on Ray: two nodes of this machine, KV that moves between processes of both, and whatever may die."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install phasewise[cluster]")

from ray.cluster_utils import Cluster  # noqa: E402

from phasewise.cluster import rays  # noqa: E402
from phasewise.cluster.actor import Actor  # noqa: E402
from phasewise.cluster.desk import Desk  # noqa: E402
from phasewise.cluster.router import Patience, Router  # noqa: E402
from phasewise.cluster.source import Source  # noqa: E402
from phasewise.errors import UserError  # noqa: E402
from phasewise.recipe import Limits  # noqa: E402
from phasewise.request import Params, Request  # noqa: E402
from tests import tiny  # noqa: E402

pytestmark = [
    pytest.mark.timeout(900),  # processes start slowly on a machine that is busy
    pytest.mark.skipif(
        not os.environ.get("PHASEWISE_TEST_RAY"), reason="run by `make test-ray`: wants a quiet machine"
    ),
]
MEMORY = 100 << 20  # bytes of the object store of a node
PLACE = "disaggregated:prefill=1,decode=2,deadline=60"
PROMPTS = tiny.prompts(
    40, 900, 5, 333, 64
)  # the KV of long ones goes through shared memory, that of short ones does not
MIXED = [Params(60, temperature=t, seed=i, ignore_eos=True) for i, t in enumerate((0.0, 1.0, 0.7, 0.0, 1.3))]
KILLED = {"schedule": "sarathi:budget=16"}  # prompts take long enough to die in


def source(cluster: str = "ray", **verbs: str) -> Source:
    limits = Limits(kv_bytes=64 << 20, cluster=cluster)
    return Source(str(tiny.checkpoint()), limits, verbs={"place": PLACE, **KILLED, **verbs})


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A head with two CPUs and another node with one; this process is a driver at the head."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tempfile.mkdtemp(prefix="pw", dir="/tmp")  # names of sockets must be short
        for name, value in {"RAY_TMPDIR": folder, "RAY_USAGE_STATS_ENABLED": "0"}.items():
            patch.setenv(name, value)
        patch.delenv("RAY_ADDRESS", raising=False)
        health = {
            "health_check_period_ms": 500,
            "health_check_failure_threshold": 6,
            "health_check_initial_delay_ms": 0,
        }
        nodes = Cluster()
        try:
            nodes.add_node(num_cpus=2, object_store_memory=MEMORY, include_dashboard=False, _system_config=health)
            nodes.add_node(num_cpus=1, object_store_memory=MEMORY)
            ray.init(nodes.address, namespace="tests", log_to_driver=False)
            yield nodes
        finally:
            ray.shutdown()
            nodes.shutdown()
            shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def placed(cluster: Cluster) -> Iterator[Router]:
    """One prefill worker and two decode workers, a CPU each."""
    router = source().build().build()
    assert isinstance(router, Router)
    router.patience = Patience(move=60.0, silence=60.0, start=300.0)
    yield router
    router.close()


# ---- helpers
def inside(desk: Desk, ask: Callable[[Any], Any]) -> Any:
    """What a function says that is called in a worker's process."""
    return ray.get(desk.line.actor.__ray_call__.remote(ask), timeout=60)


def pid(desk: Desk) -> int:
    return int(inside(desk, lambda actor: os.getpid()))


def node(desk: Desk) -> str:
    return str(inside(desk, lambda actor: ray.get_runtime_context().get_node_id()))


def references(actor: Any = None) -> int:
    """How many objects this process keeps alive."""
    gc.collect()  # exceptions that were caught hold their frames
    return len(ray._private.worker.global_worker.core_worker.get_all_reference_counts())


def of(placed: Router, role: str) -> list[Desk]:
    return [desk for desk in placed.desks if desk.role == role]


def start(placed: Router, params: Sequence[Params]) -> list[Request]:
    requests = [Request(prompt, p) for prompt, p in zip(PROMPTS, params)]
    for request in requests:
        placed.add(request)
    return requests


def until(placed: Router, done: Callable[[], bool], seconds: float = 300.0) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline, "nothing comes of it"
        placed.step()


def finish(placed: Router, requests: Sequence[Request]) -> list[list[int]]:
    """What the requests give. Nothing may be left behind, neither KV nor references to objects."""
    until(placed, lambda: all(request.left for request in requests) and placed.idle and placed.staff.ready)
    placed.forget_prefixes()
    until(placed, lambda: placed.idle)
    assert placed.kv_bytes == 0
    assert references() <= len(placed.desks) + 1, "a call under way for each, and the one this makes"
    assert [inside(desk, references) for desk in placed.desks] == [0] * len(placed.desks)
    return tiny.outs(requests)


def colocated(params: Sequence[Params]) -> list[list[int]]:
    return tiny.outs(tiny.run(tiny.engine(), PROMPTS, params))


def gone(process: int, seconds: float = 30.0) -> bool:
    deadline = time.monotonic() + seconds
    while os.path.exists(f"/proc/{process}"):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


# ---- what is asked for
def test_what_cannot_be_is_refused_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not ray.is_initialized()
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with pytest.raises(UserError, match="RAY_ADDRESS=127.0.0.1:1"):
        source().build().build()
    with pytest.raises(UserError, match="strategy='SPRAED': choose one of SPREAD, PACK"):
        source("ray:strategy=SPRAED").build().build()
    with pytest.raises(UserError, match="cpus=0 must be at least 1"):
        source("ray:cpus=0").build().build()
    with pytest.raises(UserError, match="one KV pool run on one host: use --cluster processes"):
        source(place="semi_pd").build().build()
    assert not ray.is_initialized()


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name in ("phasewise.cluster.rays", "phasewise.cluster.objects")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UserError, match=r"pip install phasewise\[cluster\]"):
        source().build().build()


def test_a_worker_that_cannot_be_built_says_why() -> None:
    missing = Source("/no/such/model", Limits(cluster="ray")).plain()
    actor = Actor(missing, {"role": "decode", "phases": ["prefill", "decode"], "share": 1.0, "threads": 1})
    with pytest.raises(UserError, match="/no/such/model"):
        while True:
            assert actor.hear(0) == []


def test_workers_without_room_are_refused(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rays, "ROOM", 0.5)
    with pytest.raises(UserError, match=r"3 workers with 1 \+ 1 \+ 1 CPUs \(STRICT_SPREAD\) have no room"):
        source("ray:strategy=STRICT_SPREAD").build().build()
    assert ray.is_initialized(), "who was there before stays"


# ---- tokens
def test_kv_moves_between_two_nodes_and_tokens_stay_the_same(cluster: Cluster, placed: Router) -> None:
    assert finish(placed, start(placed, MIXED)) == colocated(MIXED)
    counters = placed.counters
    assert (counters.handoffs, counters.recomputed, counters.restarts) == (len(PROMPTS), 0, 0)
    (prefill,) = of(placed, "prefill")
    assert len({node(desk) for desk in placed.desks}) == len(cluster.list_all_nodes()) == 2
    far = [desk for desk in of(placed, "decode") if node(desk) != node(prefill)]
    assert far and all(desk.state["counters"]["handoffs"] for desk in far), "nothing has crossed from node to node"
    assert len({pid(desk) for desk in placed.desks}) == 3


def test_cancel_wherever_a_request_is(placed: Router) -> None:
    params = [tiny.greedy(100)] * len(PROMPTS)
    requests = start(placed, params)
    assert placed.cancel(requests[1])  # its prompt is long
    until(placed, lambda: requests[0].n_out > 5)
    assert placed.cancel(requests[0])
    until(placed, lambda: requests[3].n_out > 0)
    assert placed.cancel(requests[3])  # about to move, or moving
    finish(placed, requests)
    assert [r.left.how for r in requests if r.left] == ["cancelled", "cancelled", "finished", "cancelled", "finished"]
    expected = colocated(params)
    assert [r.out for r in requests] == [want[: r.n_out] for r, want in zip(requests, expected)]
    assert requests[2].n_out == requests[4].n_out == 100


# ---- deaths
def test_a_process_that_is_killed_costs_time_only(placed: Router) -> None:
    params = [tiny.greedy(200)] * len(PROMPTS)
    requests = start(placed, params)
    (prefill,) = of(placed, "prefill")
    rows = prefill.state["counters"]["rows"]
    until(placed, lambda: prefill.state["counters"]["rows"] > rows + 100)
    assert not requests[1].n_out, "its prompt takes longer"
    os.kill(pid(prefill), signal.SIGKILL)
    until(placed, lambda: min(request.n_out for request in requests) > 10)
    holds = {trip.desk for trip in placed._trips.values()}
    victim = next(desk for desk in of(placed, "decode") if desk in holds)
    os.kill(pid(victim), signal.SIGKILL)
    assert finish(placed, requests) == colocated(params)
    assert placed.counters.workers_lost == 2 and placed.counters.restarts >= 2
    assert {desk.role for desk in placed.desks} == {"prefill", "decode"} and len(placed.desks) == 3
    assert placed.crew._seats.placed and not {prefill, victim} & {*placed.desks}


def test_a_node_that_dies_is_waited_for(cluster: Cluster, placed: Router) -> None:
    params = [tiny.greedy(200)] * len(PROMPTS)
    lost = placed.counters.workers_lost
    requests = start(placed, params)
    until(placed, lambda: min(request.n_out for request in requests) > 3)
    (other,) = cluster.worker_nodes
    (victim,) = [desk for desk in placed.desks if node(desk) == other.node_id]
    cluster.remove_node(other, allow_graceful=False)
    until(placed, lambda: victim not in placed.desks)
    if victim.role == "decode":  # the head has no CPU to spare, but another decode worker
        until(placed, lambda: all(request.left for request in requests))
    until(placed, lambda: not placed.crew._seats.placed)
    assert not placed.staff.ready
    cluster.add_node(num_cpus=1, object_store_memory=MEMORY)
    assert finish(placed, requests) == colocated(params)
    assert placed.counters.workers_lost == lost + 1
    assert len({node(desk) for desk in placed.desks}) == 2


# ---- the end
def test_close_leaves_no_process_behind(placed: Router) -> None:
    processes = [pid(desk) for desk in placed.desks]
    placed.close()
    assert all(gone(process) for process in processes)
    states = [group["state"] for group in ray.util.placement_group_table().values()]
    assert set(states) <= {"REMOVED"}
    assert ray.is_initialized(), "the cluster was not ours to leave"


ALONE = """
import sys
from phasewise.cluster.source import Source
from phasewise.recipe import Limits
from tests.cluster.test_ray import MIXED, finish, pid, start

limits = Limits(kv_bytes=64 << 20, cluster="ray")
placed = Source(sys.argv[1], limits, verbs={"place": "disaggregated:deadline=60"}).build().build()
print([pid(desk) for desk in placed.desks])
print(finish(placed, start(placed, MIXED)))
placed.close()
"""


def test_a_cluster_of_its_own_ends_with_the_placement(tmp_path: Path) -> None:
    """No cluster runs on this machine, as far as the process can know: it starts one, and leaves nothing of it."""
    with tempfile.TemporaryDirectory(prefix="pw", dir="/tmp", ignore_cleanup_errors=True) as folder:
        hidden = ("RAY_ADDRESS", "RAY_JOB_ID")
        env = {name: value for name, value in os.environ.items() if name not in hidden}
        env |= {"RAY_TMPDIR": folder, "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, "-c", ALONE, str(tiny.checkpoint())], env=env, capture_output=True, text=True, timeout=600
        )
        assert done.returncode == 0, done.stderr
        pids, tokens = map(eval, done.stdout.strip().splitlines())
        assert tokens == colocated(MIXED)
        assert len(set(pids)) == 2 and all(map(gone, pids))
        deadline = time.monotonic() + 30.0
        while (left := processes_of(folder)) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not left


def processes_of(folder: str) -> list[str]:
    """Command lines of processes that name a folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue  # it has ended
        if folder in words:
            found.append(words)
    return found
