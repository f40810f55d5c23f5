"""Two hundred requests while something breaks each second: every stream is the one it would have been."""

from __future__ import annotations

import random
import time
from functools import cache

import pytest

from phasewise.cluster.handle import WorkerHandle
from phasewise.cluster.router import Router
from phasewise.cluster.supervisor import Timeouts
from phasewise.request.counters import Counters
from phasewise.request.params import Params
from tests import seeds, tiny
from tests.cluster.faulty import HEARD, TOLD, Fate
from tests.cluster.processes import Order, finish, fork_server, gone, kill, pid, segments, started, stop, until

REQUESTS = 200
EVERY = 1.0  # seconds between two faults
FAULTS = (
    *("kill a worker",) * 4, *("stop a worker",) * 2, *("lose messages",) * 4,
    "kill the fork server and a worker", "stop the fork server and kill a worker",
)  # fmt: skip
PLACES = (
    "disaggregated:prefill=2,decode=2,deadline=4",
    "disaggregated:prefill=2,decode=2,deadline=4,transfer=push",
    "splitwise:prompt=1,token=2,deadline=4",
)
KINDS = (*TOLD, *HEARD, "expect", "piece", "keep", "landed", "full")
SHORT = Timeouts(handoff=4.0, silence=4.0, start=8.0)  # long enough for a busy machine; whoever is late is replaced


class Weather:
    """The fates of the next messages; all arrive when nothing is said."""

    def __init__(self) -> None:
        self.ahead: list[Fate] = []

    def __call__(self, number: int) -> Fate:
        return self.ahead.pop() if self.ahead else 0


class Havoc:
    """Breaks one thing after another, in an order that is drawn, and says so (pytest shows it after a failure)."""

    def __init__(self, placed: Router, weather: Weather) -> None:
        self.placed, self.weather, self.draw = placed, weather, seeds.draw(__name__)
        self.left = list(FAULTS)
        self.draw.shuffle(self.left)
        self.hit: set[int] = set()  # processes of workers
        self.began = self.struck_at = time.monotonic()

    @property
    def struck(self) -> float:
        """Faults so far, and the part of the time to the next."""
        return len(FAULTS) - len(self.left) + min(1.0, (time.monotonic() - self.struck_at) / EVERY)

    def strike(self) -> None:
        """Break the next thing, once it is time and the thing is there."""
        if not self.left or time.monotonic() - self.struck_at < EVERY:
            return
        what = self._break(self.left[-1])
        if what:
            self.left.pop()
            self.struck_at = time.monotonic()
            print(f"{self.struck_at - self.began:5.1f} s  {what}")

    def _break(self, fault: str) -> str:
        """-> what was done, or nothing"""
        if fault == "lose messages":
            self.weather.ahead = [self.draw.choice(("lose", "twice", 3, 60)) for _ in range(8)]
            return f"the fates of the next messages: {self.weather.ahead[::-1]}"
        handles = [handle for handle in self.placed.handles if self._at_work(handle)]
        if not handles or ("fork server" in fault and not self.placed.supervisor.ready):
            return ""  # where three workers die unborn it is over, and rightly so
        if "fork server" in fault:
            (kill if fault.startswith("kill") else stop)(fork_server(self.placed).pid)
        victim = self.draw.choice(handles)
        self.hit.add(pid(victim))
        (stop if fault == "stop a worker" else kill)(pid(victim))
        return f"{fault}: {victim.name}"

    def _at_work(self, handle: WorkerHandle) -> bool:
        return bool(handle.state) and handle.connection.alive and pid(handle) not in self.hit


class Load:
    """Requests of all sizes, greedy and sampled, and the streams they give; some callers hang up."""

    def __init__(self) -> None:
        draw = random.Random(0)
        texts = tiny.prompts(*(draw.choice((3, 20, 64, 150, 300)) + draw.randrange(40) for _ in range(60)))
        self.prompts = [draw.choice(texts) for _ in range(REQUESTS)]  # some come again: their prefix may be cached
        self.params = [self._params(draw, seed) for seed in range(REQUESTS)]
        self.hangs_up = {i: draw.choice((0, 1, 2, 20)) for i in draw.sample(range(REQUESTS), REQUESTS // 10)}  # tokens
        self.wanted = tiny.plain(self.prompts, self.params)

    def _params(self, draw: random.Random, seed: int) -> Params:
        length, temperature = draw.choice((1, 2, 10, 50, 120, 250)), draw.choice((0.0, 0.0, 0.8, 1.2))
        return Params(length, temperature=temperature, top_p=0.95, seed=seed, ignore_eos=draw.random() < 0.7)


@cache
def load() -> Load:
    return Load()


@pytest.mark.parametrize("place", [seeds.draw(__name__).choice(PLACES)])
def test_something_breaks_each_second(place: str) -> None:
    load()
    weather = Weather()
    placed = started(place, {"schedule": "sarathi:budget=64"}, (weather, KINDS))
    placed.timeouts = SHORT
    try:
        havoc = Havoc(placed, weather)
        orders = served(placed, havoc)
        weather.ahead.clear()
        until(placed, lambda: all(map(gone, havoc.hit)))
        done = finish(placed, orders, Counters(), leases=True)
        print(f"{time.monotonic() - havoc.began:5.1f} s  {done}")
        check(orders)
        assert done.workers_lost >= len(havoc.hit) >= 8
        assert done.restarts > 0 and done.recomputed > 0
    finally:
        placed.close()
    assert segments(placed) == []


def served(placed: Router, havoc: Havoc) -> list[Order]:
    """All requests, which come while things break."""
    orders: list[Order] = []

    def over() -> bool:
        havoc.strike()
        while len(orders) < min(REQUESTS, REQUESTS * havoc.struck / len(FAULTS)):
            orders.append(Order(load().prompts[len(orders)], load().params[len(orders)]))
            placed.add(orders[-1].request)
        for i, tokens in load().hangs_up.items():
            if i < len(orders) and orders[i].request.left is None and orders[i].request.n_out >= tokens:
                placed.cancel(orders[i].request)
        return not havoc.left and len(orders) == REQUESTS and all(order.request.left for order in orders)

    until(placed, over)
    return orders


def check(orders: list[Order]) -> None:
    for i, (order, wanted) in enumerate(zip(orders, load().wanted, strict=True)):
        left, out = order.request.left, order.request.out
        assert left is not None and left.how in ("finished", "cancelled"), f"request {i}: {left}"
        if left.how == "cancelled":
            assert i in load().hangs_up and out == wanted[: len(out)], f"request {i}"
        else:
            assert out == wanted, f"request {i}"
