"""Workers on Ray: two nodes of this machine, KV that moves between processes of both, and whatever may die."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install phasewise[cluster]")

from phasewise.builder import build  # noqa: E402
from phasewise.cluster import ray_backend as rays  # noqa: E402
from phasewise.cluster.engine_spec import EngineSpec  # noqa: E402
from phasewise.cluster.ray_buffer import RayBuffer  # noqa: E402
from phasewise.cluster.ray_worker import RayWorker  # noqa: E402
from phasewise.cluster.transfer_buffer import Lost  # noqa: E402
from phasewise.engine.limits import Limits  # noqa: E402
from phasewise.engine.lora import LORA, Lora  # noqa: E402
from phasewise.errors import PhasewiseError, UserError  # noqa: E402
from phasewise.kv.handoff import State  # noqa: E402
from phasewise.options import parse  # noqa: E402
from phasewise.request.params import Params  # noqa: E402
from phasewise.request.request import Request  # noqa: E402
from tests import peft, tiny  # noqa: E402
from tests.cluster import nodes as on  # noqa: E402
from tests.cluster.nodes import Nodes, Stage, gone, inside, node, pid, within  # noqa: E402
from tests.seeds import draw  # noqa: E402

pytestmark = pytest.mark.timeout(900)  # processes start slowly on a machine that is busy
MIXED = [Params(60, temperature=t, seed=i, ignore_eos=True) for i, t in enumerate((0.0, 1.0, 0.7, 0.0, 1.3))]
GREEDY = [tiny.greedy(200)] * len(on.PROMPTS)
ENDLESS = [tiny.greedy(3000)] * len(on.PROMPTS)  # a worker may be far ahead of what has been heard of it


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    with on.two_nodes() as nodes:
        yield nodes


@pytest.fixture(scope="module")
def kept(nodes: Nodes) -> Iterator[list[Stage]]:
    """The placement of the test before, if that has left it as it was."""
    kept: list[Stage] = []
    yield kept
    for stage in kept:
        stage.router.close()


@pytest.fixture
def stage(nodes: Nodes, kept: list[Stage]) -> Iterator[Stage]:
    """A placement with nothing to do, on two nodes that are alive."""
    nodes.repair()
    stage = kept.pop() if kept else Stage(nodes)
    try:
        yield stage
    finally:
        if stage.settled():
            kept.append(stage)
        else:
            stage.router.close()


def colocated(params: list[Params]) -> list[list[int]]:
    return tiny.outs(tiny.run(on.engine(), on.PROMPTS, params))


# ---- what is asked for
def test_what_cannot_be_is_refused_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not ray.is_initialized()
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with pytest.raises(UserError, match="RAY_ADDRESS=127.0.0.1:1"):
        on.start()
    with pytest.raises(UserError, match="strategy='SPRAED': choose one of SPREAD, PACK"):
        on.start("ray:strategy=SPRAED")
    with pytest.raises(UserError, match="cpus=0 must be at least 1"):
        on.start("ray:cpus=0")
    with pytest.raises(UserError, match="one KV pool run on one host: use --cluster processes"):
        on.start(place="semi_pd")
    assert not ray.is_initialized()


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [
        name for name in sys.modules if name in ("phasewise.cluster.ray_backend", "phasewise.cluster.ray_buffer")
    ]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UserError, match=r"pip install phasewise\[cluster\]"):
        on.start()


def test_a_worker_that_cannot_be_built_says_why() -> None:
    missing = EngineSpec("/no/such/model", Limits(cluster="ray")).plain()
    actor = RayWorker(missing, build, {"role": "decode", "phases": ["prefill", "decode"], "share": 1.0, "threads": 1})
    with pytest.raises(UserError, match="/no/such/model"):
        while True:
            assert actor.hear(0) == []


def test_workers_without_room_are_refused(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rays, "ROOM", 0.5)
    with pytest.raises(UserError, match=r"3 workers with 1 \+ 1 \+ 1 CPUs \(STRICT_SPREAD\) have no room"):
        on.start("ray:strategy=STRICT_SPREAD")
    assert ray.is_initialized(), "who was there before stays"


# ---- tokens
def test_kv_moves_between_two_nodes_and_tokens_stay_the_same(stage: Stage) -> None:
    before = stage.router.counters
    assert stage.finish(stage.start(MIXED)) == colocated(MIXED)
    counters = stage.router.counters
    assert counters.handoffs - before.handoffs == len(on.PROMPTS)
    assert (counters.recomputed, counters.restarts) == (before.recomputed, before.restarts)
    (far,) = stage.near()
    assert far.state["counters"]["handoffs"], "nothing has crossed from node to node"
    assert len({pid(handle) for handle in stage.router.handles}) == 3


def test_recipes_cross_between_nodes(stage: Stage) -> None:
    names, params = ["small", "long", "", "small", "long"], [tiny.greedy(20)] * len(on.PROMPTS)
    want = []
    for prompt, name in zip(on.PROMPTS, names):
        want += tiny.outs(tiny.run(on.engine(on.RECIPES.get(name)), [prompt], params[0]))
    before = stage.router.counters
    assert stage.finish(stage.start(params, names)) == want
    assert stage.router.counters.handoffs - before.handoffs == len(names)
    assert want != colocated(params), "the recipes cannot be told apart"


def test_adapters_are_read_by_workers_of_every_node(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder that was named from where this process is: actors are elsewhere."""
    base = tiny.model(context=on.CONTEXT)
    peft.write(tmp_path / "x", tiny.checkpoint(context=on.CONTEXT))
    monkeypatch.chdir(tmp_path)
    lora, params = Lora.read("x", "x", base.config, 8), [tiny.greedy(20)] * len(on.PROMPTS)
    adapted = {"adapted": {**parse(on.SLOW), LORA: lora.bare()}}
    alone = on.engine()
    alone.learn({"adapted": {**parse({}), LORA: lora}})
    requests = [Request(prompt, params[0], recipe="adapted") for prompt in on.PROMPTS]
    for request in requests:
        alone.add(request)
    tiny.finish(alone, requests)
    before = stage.router.counters.handoffs
    stage.router.learn(adapted)
    try:
        assert stage.finish(stage.start(params, ["adapted"] * len(params))) == tiny.outs(requests)
        assert stage.router.counters.handoffs - before == len(params) and stage.router.lora_bytes
        assert tiny.outs(requests) != colocated(params), "the adapter changes nothing"
    finally:
        stage.router.forget(["adapted"])


def test_tensors_cross_between_nodes_as_they_are(stage: Stage) -> None:
    tensors = [
        torch.randn(300, 70, 4)[:, ::3],
        torch.randn(3, 5).to(torch.bfloat16),
        torch.randint(-9, 9, (7,), dtype=torch.int8),
        torch.tensor([True, False]),
        torch.empty(0, 4),
        torch.tensor(3.5),
    ]
    assert stage.prefill in stage.away()
    parcel = inside(stage.prefill, lambda actor: actor._transfer_buffer.put(tensors))
    transfer_buffer = RayBuffer()
    assert transfer_buffer.here([parcel], 60.0)
    for given, got in zip(tensors, transfer_buffer.get(parcel), strict=True):
        assert (got.dtype, got.shape) == (given.dtype, given.shape) and torch.equal(got, given)
    del parcel, got
    assert stage.finish([]) == []


def test_cancel_wherever_a_request_is(stage: Stage) -> None:
    params = [tiny.greedy(100)] * len(on.PROMPTS)
    requests = stage.start(params)
    assert stage.router.cancel(requests[1])  # its prompt is long
    stage.until(lambda: requests[0].n_out > 5)
    assert stage.router.cancel(requests[0])
    stage.until(lambda: requests[3].n_out > 0)
    assert stage.router.cancel(requests[3])  # about to move, or moving
    stage.finish(requests)
    assert [r.left.how for r in requests if r.left] == ["cancelled", "cancelled", "finished", "cancelled", "finished"]
    expected = colocated(params)
    assert [r.out for r in requests] == [want[: r.n_out] for r, want in zip(requests, expected)]
    assert requests[2].n_out == requests[4].n_out == 100


# ---- deaths
def test_a_process_that_is_killed_costs_time_only(stage: Stage) -> None:
    placed, prefill, before = stage.router, stage.prefill, stage.router.counters
    processes = {handle: pid(handle) for handle in placed.handles}
    parcel = inside(prefill, lambda actor: actor._transfer_buffer.put([torch.zeros(100_000)]))
    assert torch.equal(RayBuffer().get(parcel)[0], torch.zeros(100_000))
    requests = stage.start(GREEDY)
    rows = prefill.state["counters"]["rows"]
    stage.until(lambda: prefill.state["counters"]["rows"] > rows + 100)
    assert not requests[1].n_out, "its prompt takes longer"
    os.kill(processes[prefill], signal.SIGKILL)
    stage.until(lambda: min(request.n_out for request in requests) > 10)
    victim = next(handle for handle in stage.decoders if handle in stage.holders())
    os.kill(processes[victim], signal.SIGKILL)
    stage.until(lambda: prefill not in placed.handles and victim not in placed.handles)
    assert RayBuffer().here([parcel], 60.0), "what is lost is not waited for"
    with pytest.raises(Lost, match="OwnerDiedError"):
        RayBuffer().get(parcel)
    del parcel
    assert stage.finish(requests) == colocated(GREEDY)
    assert placed.counters.workers_lost - before.workers_lost == 2
    assert placed.counters.restarts - before.restarts >= 2
    assert {handle.role for handle in placed.handles} == {"prefill", "decode"} and len(placed.handles) == 3
    assert placed.launcher._views.placed


def test_a_process_that_hangs_is_taken_for_dead(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    placed, before = stage.router, stage.router.counters
    processes = {handle.name: pid(handle) for handle in placed.handles}
    requests = stage.start(GREEDY)
    stage.until(lambda: min(request.n_out for request in requests) > 10)
    victim = next(handle.name for handle in stage.decoders if handle in stage.holders())
    with on.frozen(processes[victim]):
        with monkeypatch.context() as patch:
            patch.setattr(placed, "timeouts", replace(placed.timeouts, silence=5.0))
            stage.until(lambda: victim not in [handle.name for handle in placed.handles])
        assert stage.finish(requests) == colocated(GREEDY)
        assert gone(processes[victim]), "it lives on and keeps its CPU"
    assert placed.counters.workers_lost > before.workers_lost


def prefilling(stage: Stage) -> Callable[[], bool]:
    prefill = stage.prefill
    rows = prefill.state["counters"]["rows"]
    return lambda: prefill.state["counters"]["rows"] > rows + 100


def sending(stage: Stage) -> Callable[[], bool]:
    """KV lies on the node that dies, and a worker on the other one has been told to take it."""
    (near,) = stage.near()
    flights = stage.router.flights
    return lambda: any(
        t.transfer and t.transfer.state is State.SENDING and t.transfer.target is near for t in flights.values()
    )


def decoding(stage: Stage) -> Callable[[], bool]:
    (decode,) = (handle for handle in stage.away() if handle.role == "decode")
    flights = stage.router.flights
    return lambda: decode in stage.holders() and all(flight.caller.n_out > 3 for flight in flights.values())


@pytest.mark.parametrize("moment", [draw(__name__).choice([prefilling, sending, decoding])])
def test_a_node_that_dies_is_waited_for(
    nodes: Nodes, stage: Stage, moment: Callable[[Stage], Callable[[], bool]]
) -> None:
    placed, before, away, (near,) = stage.router, stage.router.counters, stage.away(), stage.near()
    process, lost, come = pid(near), [pid(handle) for handle in away], moment(stage)
    with on.frozen(process) if moment is sending else contextlib.nullcontext():  # what it is to take comes too late
        params = ENDLESS if moment is decoding else GREEDY
        requests = stage.start(params)
        stage.until(come)
        with contextlib.ExitStack() as stack:  # they finish nothing while their node goes down
            for held in lost:
                stack.enter_context(on.frozen(held))
            nodes.kill()
        stage.until(lambda: not {*away} & {*placed.handles})
    stage.until(lambda: not placed.launcher._views.placed)
    assert not placed.supervisor.ready, "who shall work there waits for a node"
    nodes.repair()
    if moment is decoding:  # they need not end for what came before and after to be compared
        known = [request.n_out for request in requests]
        stage.until(lambda: all(request.n_out > n + 20 for request, n in zip(requests, known)))
        for request in requests:
            placed.cancel(request)
    given = stage.finish(requests)
    whole = colocated([tiny.greedy(max(map(len, given)))] * len(requests))
    assert given == [want[: len(tokens)] for want, tokens in zip(whole, given)]
    assert moment is decoding or {len(tokens) for tokens in given} == {200}
    assert near in placed.handles and placed.counters.workers_lost - before.workers_lost >= len(away) == 2
    assert placed.counters.restarts > before.restarts
    assert len({node(handle) for handle in placed.handles}) == 2


# ---- the end
def test_close_leaves_no_process_behind(stage: Stage) -> None:
    placed = stage.router
    processes, lines = [pid(handle) for handle in placed.handles], [handle.connection for handle in placed.handles]
    request = Request(on.PROMPTS[0], tiny.greedy(100))
    placed.add(request)
    placed.close()
    assert placed.cancel(request)
    assert all(gone(process) for process in processes)
    assert [line.hear() for line in lines] == [[], [], []], "a question would start Ray again if it were ours"
    with pytest.raises(PhasewiseError, match="have been dismissed"):
        placed.launcher.launch("late", placed.handles[0].spec)
    states = [group["state"] for group in ray.util.placement_group_table().values()]
    assert set(states) <= {"REMOVED"}
    assert ray.is_initialized(), "the cluster was not ours to leave"
    assert within(lambda: on.references() == 0)
