"""The simulator and real engines under one router: the same load has the same event log, command by command."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from phasewise.builder import Builder
from phasewise.cluster.router import Router
from phasewise.engine.engine import Engine
from phasewise.engine.limits import Limits
from phasewise.options import parse
from phasewise.plan.event_loop import Turn
from phasewise.plan.sequence import SimulatedRequest
from phasewise.plan.simulated_cluster import SimulatedCluster
from phasewise.request.params import Params
from phasewise.request.request import Request
from tests import tiny
from tests.place.links import Clock
from tests.plan.scenarios import Linear, scenario

SCHEDULE = "sarathi:budget=48"
ROWS = 1 << 15  # of KV in the budget
KEPT = {"id", "attempt", "do", "event", "piece", "pieces", "push"}  # of each message
Load = Sequence[tuple[int, list[int], int]]  # when a request comes, its prompt, and the tokens it asks for
Log = list[tuple[float, str, dict[str, Any]]]


def load(seed: int) -> Load:
    """Thirty requests within twenty steps; some prompts share their first 64 tokens."""
    rng = Random(seed)
    shared = [rng.randrange(3, tiny.VOCAB) for _ in range(64)]
    found = []
    for _ in range(30):
        own = [rng.randrange(3, tiny.VOCAB) for _ in range(rng.randint(5, 90))]
        found.append((rng.randrange(20), shared + own if rng.random() < 0.4 else own, rng.randint(1, 25)))
    return sorted(found, key=lambda one: one[0])


def logged(router: Router, clock: Callable[[], float]) -> Log:
    """From now on, whatever the router and its workers say to each other of requests, who starts, and when."""
    log: Log = []

    def listen(connection: Any) -> Any:
        tell, hear, name = connection.tell, connection.hear, connection.name

        def told(command: dict[str, Any]) -> None:
            if "id" in command or command["do"] == "add":
                said = {"id": command.get("id") or command["request"]["id"], **command}
                log.append((clock(), name, {key: said[key] for key in KEPT & said.keys()}))
            tell(command)

        def heard() -> list[dict[str, Any]]:
            events: list[dict[str, Any]] = hear()
            for event in events:
                news = event["event"] != "progress" or event["left"] is not None or not known(event)
                if "id" in event and news:
                    left = {"left": event["left"] is not None} if "left" in event else {}
                    log.append((clock(), name, {key: event[key] for key in KEPT & event.keys()} | left))
            return events

        connection.tell, connection.hear = told, heard
        return connection

    def known(event: dict[str, Any]) -> bool:
        """Whether the caller has tokens already."""
        return event["id"] in router.flights and router.flights[event["id"]].caller.n_out > 0

    launch = router.launcher.launch

    def launched(name: str, spec: Any) -> Any:
        log.append((clock(), name, {"event": "launched"}))
        return listen(launch(name, spec))

    for handle in router.handles:
        listen(handle.connection)
    router.launcher.launch = launched  # type: ignore[method-assign]
    return log


def told(router: Router) -> None:
    """Everybody is heard, and all answers to that."""
    for _ in range(4):
        router.react()


def real(place: str, asked: Load, deaths: dict[int, int], **limits: Any) -> tuple[Log, list[Request]]:
    """Engines in this thread, by a clock on which every step takes a second: the worker at this place dies then."""
    clock = Clock()
    options = {"place": place, "schedule": SCHEDULE}
    probe = tiny.engine()
    assert isinstance(probe, Engine)
    given = Limits(**{"kv_bytes": ROWS * probe.store.row_bytes, "cluster": "inline", **limits})
    router = Builder(tiny.model(), parse(options), given, load=tiny.load, clock=clock).build()
    assert isinstance(router, Router)
    log, places, todo, made = logged(router, clock), list(router.handles), list(asked), list[Request]()
    while todo or not router.idle:
        if (died := deaths.get(int(clock.now))) is not None:
            places[died].connection.kill()
            told(router)
        while todo and todo[0][0] <= clock.now:
            _, prompt, new = todo.pop(0)
            made.append(Request(prompt, Params(max_tokens=new, ignore_eos=True), id=f"r{len(made)}"))
            router.add(made[-1])
            told(router)
        router.supervisor.wait(0.0)  # everybody's step
        clock.tick()
        told(router)
        assert clock.now < 1000, "no end"
    return log, made


def simulated(place: str, asked: Load, deaths: dict[int, int], **more: Any) -> tuple[Log, list[SimulatedRequest]]:
    made = scenario(Linear(1.0), place, schedule=SCHEDULE, kv_bytes=ROWS * 1024, layers=4, **more)
    cluster = SimulatedCluster(replace(made.layout, revive=0.0), made.placing, made.cores, lambda request: None)
    router, loop = cluster.router, cluster.loop
    assert router is not None
    log = logged(router, lambda: loop.now)
    jobs = [SimulatedRequest(f"r{i}", prompt, new, float(at)) for i, (at, prompt, new) in enumerate(asked)]
    for when, worker in deaths.items():
        loop.at(float(when), Turn.ARRIVE, cluster.kill, worker)
    for job in jobs:
        loop.at(job.arrived, Turn.ARRIVE, cluster.add, job)
    cluster.run()
    for handle in router.handles:
        worker = handle.connection.worker
        assert (worker.engine.room.promised, worker._kept) == (0, 0), "capacity stays promised at the end"
    return log, jobs


PLACES = ["disaggregated:prefill=2,decode=2", "disaggregated:prefill=2,decode=2,transfer=push,local=8",
          "splitwise:prompt=2,token=2,mixed=1,threshold=90", "semi_pd:window=1e9"]  # fmt: skip


@pytest.mark.parametrize(("place", "max_running"), [
    *((place, 4) for place in PLACES), (PLACES[1], 64),
    *(pytest.param(place, 64, marks=pytest.mark.thorough) for place in PLACES if place != PLACES[1]),
])  # fmt: skip
def test_the_same_log(place: str, max_running: int) -> None:
    """Who is told of which request when, what is handed over, and whom the router starts again when two workers die;
    with few places at each worker, requests also wait for one another."""
    deaths = {6: 0, 11: 1} if place.startswith("semi_pd") else {6: 0, 11: 3}
    asked = load(seed=len(place))
    mine, callers = real(place, asked, deaths, max_running=max_running, prefix_cache=True)
    theirs, jobs = simulated(place, asked, deaths, max_running=max_running, prefix_cache=True)
    for number, (one, other) in enumerate(zip(mine, theirs)):
        assert one == other, f"entry {number}"
    assert len(mine) == len(theirs)
    said = [message for _, _, message in mine]
    assert sum(message.get("event") == "launched" for message in said) == 2
    assert any(message.get("event") == "owned" for message in said)
    assert any(message.get("do") == "add" and message["attempt"] >= len(asked) for message in said), (
        "nobody started anew"
    )
    assert [len(caller.out) for caller in callers] == [job.n_out for job in jobs] == [new for _, _, new in asked]
