"""The engine's thread, with an engine of numbers: who is told what, how often, and what happens when things break."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from phasewise.errors import UserError
from phasewise.request.counters import Counters
from phasewise.request.params import Params
from phasewise.request.request import Departure, Request
from phasewise.serve.loop import EngineLoop, OutputStream, ServerBusy, Unavailable
from phasewise.serve.notifier import Notifier


class Numbers:
    """An engine that gives every request one number per step. Prompts that begin with -1 are refused."""

    def __init__(self) -> None:
        self.counters = Counters()
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.kv_bytes = self.prefix_bytes = self.lora_bytes = 0
        self.tiers: dict[str, float] = {}
        self.workers: dict[str, int] = {}
        self.by_role: dict[str, dict[str, int]] = {}
        self.by_recipe: dict[str, dict[str, int]] = {}
        self.threads: set[str] = set()
        self.asked = 0  # how often it was asked whether it is idle
        self.hold = threading.Event()  # steps wait for it
        self.hold.set()
        self.stepping = threading.Event()  # set once a step has begun
        self.broken = False

    @property
    def idle(self) -> bool:
        self.asked += 1
        return not self.running

    def add(self, request: Request) -> None:
        self.threads.add(threading.current_thread().name)
        if request.prompt[0] == -1:
            raise UserError("this prompt is refused")
        if request.prompt[0] == -2:
            raise RuntimeError("adding is broken")
        self.running.append(request)

    def cancel(self, request: Request) -> bool:
        self.threads.add(threading.current_thread().name)
        if request not in self.running:
            return False
        self.running.remove(request)
        request.left = Departure("cancelled", "cancelled")
        return True

    def step(self) -> list[Request]:
        self.threads.add(threading.current_thread().name)
        self.stepping.set()
        assert self.hold.wait(10)
        if self.broken:
            raise RuntimeError("out of order")
        self.counters.steps += 1
        progressed = list(self.running)
        for request in progressed:
            request.emit([request.n_out], (), time.monotonic())
            if request.left:
                self.running.remove(request)
        return progressed


def feeds(*sizes: int, partial: bool = True, first: int = 0) -> list[OutputStream]:
    return [OutputStream(Request([first], Params(max_tokens=size)), Notifier(), partial) for size in sizes]


async def ended(some: list[OutputStream]) -> None:
    async with asyncio.timeout(10):
        for feed in some:
            while feed.left is None:
                await feed.bell.wait()


def run(
    test: Callable[[EngineLoop, Numbers, list[OutputStream]], Awaitable[Any]], capacity: int = 8
) -> tuple[Numbers, list[OutputStream]]:
    """`test` on a loop of its own; afterwards everything that was accepted has left exactly once."""
    numbers, gone = Numbers(), list[OutputStream]()

    async def main() -> None:
        loop = EngineLoop(numbers, capacity, gone.append)  # type: ignore[arg-type]
        loop.start()
        try:
            await test(loop, numbers, gone)
        finally:
            numbers.hold.set()
            await asyncio.to_thread(loop.stop)
        assert loop.live == 0
        assert len(gone) == len(set(map(id, gone)))

    asyncio.run(main())
    return numbers, gone


def test_only_the_engine_thread_touches_the_engine() -> None:
    async def test(loop: EngineLoop, numbers: Numbers, gone: list[OutputStream]) -> None:
        some = feeds(3, 5, 1)
        await loop.add(some)
        await ended(some)
        assert [feed.tokens for feed in some] == [[0, 1, 2], [0, 1, 2, 3, 4], [0]]
        other = feeds(1000)
        await loop.add(other)
        loop.cancel(other)
        await ended(other)
        await loop.snapshot()

    numbers, _ = run(test)
    assert numbers.threads == {"engine"}


def test_one_wake_per_step_for_all_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(loop: EngineLoop, numbers: Numbers, gone: list[OutputStream]) -> None:
        told = 0
        tell = loop.tell

        def counting(*args: Any) -> None:
            nonlocal told
            told += 1
            tell(*args)

        monkeypatch.setattr(loop, "tell", counting)
        some = feeds(20, 20, 20, 20)
        await loop.add(some)
        await ended(some)
        assert told == 1 + numbers.counters.steps == 21  # the answer to `add`, and each step

    run(test)


def test_those_who_want_only_the_end_are_not_woken_before() -> None:
    async def test(loop: EngineLoop, numbers: Numbers, gone: list[OutputStream]) -> None:
        whole, part = feeds(5, partial=False)[0], feeds(50)[0]
        numbers.hold.clear()
        await loop.add([whole, part])
        numbers.hold.set()
        async with asyncio.timeout(10):
            await whole.bell.wait()
        assert whole.left is not None and whole.tokens == [0, 1, 2, 3, 4]
        await ended([part])

    run(test)


def test_idle_is_asleep() -> None:
    async def test(loop: EngineLoop, numbers: Numbers, gone: list[OutputStream]) -> None:
        some = feeds(3)
        await loop.add(some)
        await ended(some)
        await loop.snapshot()
        await asyncio.sleep(0.05)
        before = numbers.asked, numbers.counters.steps
        await asyncio.sleep(0.3)
        assert (numbers.asked, numbers.counters.steps) == before

    run(test)


def test_workers_are_looked_after_with_nothing_to_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phasewise.serve.loop.WATCH", 0.005)

    async def test(loop: EngineLoop, numbers: Numbers, gone: list[OutputStream]) -> None:
        numbers.workers = {"decode": 1}
        await loop.snapshot()
        async with asyncio.timeout(10):
            while numbers.counters.steps < 3:
                await asyncio.sleep(0.005)
        assert not loop.live and not gone, "steps were made with nothing to run"

    run(test)


def test_all_or_none_are_accepted() -> None:
    async def test(loop: EngineLoop, numbers: Numbers, gone: list[OutputStream]) -> None:
        with pytest.raises(UserError, match="refused"):
            await loop.add(feeds(9) + feeds(9, first=-1))
        assert not numbers.running and loop.live == 0
        with pytest.raises(RuntimeError, match="broken"):
            await loop.add(feeds(9) + feeds(9, first=-2))
        assert not numbers.running and loop.failed is None
        some = feeds(2)
        await loop.add(some)
        await ended(some)

    _, gone = run(test)
    assert len(gone) == 1


def test_the_queue_is_bounded() -> None:
    async def test(loop: EngineLoop, numbers: Numbers, gone: list[OutputStream]) -> None:
        numbers.hold.clear()
        some = feeds(5, 5)
        await loop.add(some)
        with pytest.raises(ServerBusy):
            await loop.add(feeds(1, 1))
        with pytest.raises(UserError):
            await loop.add(feeds(1, 1, 1, 1))  # more than it ever takes: trying again would not help
        numbers.hold.set()
        await ended(some)
        more = feeds(1, 1, 1)
        await loop.add(more)
        await ended(more)

    run(test, capacity=3)


def test_cancelling_twice_or_too_late_is_harmless() -> None:
    async def test(loop: EngineLoop, numbers: Numbers, gone: list[OutputStream]) -> None:
        some = feeds(2, 10_000)
        await loop.add(some)
        await ended(some[:1])
        loop.cancel(some)
        loop.cancel(some)
        await ended(some)
        assert [feed.left and feed.left.how for feed in some] == ["finished", "cancelled"]
        assert len(gone) == 2

    run(test)


def test_a_caller_who_gives_up_while_adding_leaves_nothing_behind() -> None:
    async def test(loop: EngineLoop, numbers: Numbers, gone: list[OutputStream]) -> None:
        await loop.add(feeds(100_000))
        numbers.hold.clear()
        await asyncio.sleep(0.05)  # a step is under way now, and takes long
        adding = asyncio.create_task(loop.add(feeds(100_000)))
        await asyncio.sleep(0.05)
        adding.cancel()
        with pytest.raises(asyncio.CancelledError):
            await adding
        numbers.hold.set()
        while len(gone) < 1:
            await asyncio.sleep(0.01)
        loop.cancel_all()
        while loop.live:
            await asyncio.sleep(0.01)
        assert not numbers.running

    run(test)


def test_a_broken_engine_fails_everybody_and_says_so() -> None:
    async def test(loop: EngineLoop, numbers: Numbers, gone: list[OutputStream]) -> None:
        some = feeds(10_000, 10_000)
        await loop.add(some)
        numbers.broken = True
        await ended(some)
        assert all(feed.left and feed.left.how == "failed" and "out of order" in feed.left.reason for feed in some)
        assert loop.failed is not None and "out of order" in loop.failed
        with pytest.raises(Unavailable, match="out of order"):
            await loop.add(feeds(1))
        loop.cancel(some)
        loop.cancel_all()
        assert (await loop.snapshot()).running == 0

    run(test)


def test_one_who_was_being_added_when_it_broke_is_told() -> None:
    async def test(loop: EngineLoop, numbers: Numbers, gone: list[OutputStream]) -> None:
        numbers.hold.clear()
        await loop.add(feeds(5))
        assert await asyncio.to_thread(numbers.stepping.wait, 10)
        late = asyncio.create_task(loop.add(feeds(5)))
        await asyncio.sleep(0)  # its command lies in the queue, and the step is still held
        numbers.broken = True
        numbers.hold.set()
        with pytest.raises(Unavailable, match="out of order"):
            await asyncio.wait_for(late, 10)

    run(test)


def test_snapshots_do_not_wait_for_a_long_step() -> None:
    async def test(loop: EngineLoop, numbers: Numbers, gone: list[OutputStream]) -> None:
        first = await loop.snapshot()
        numbers.hold.clear()
        await loop.add(feeds(2))
        assert await asyncio.to_thread(numbers.stepping.wait, 10)
        assert await loop.snapshot(patience=0.05) is first
        numbers.hold.set()

        while loop.live:
            await asyncio.sleep(0.01)
        assert (await loop.snapshot()).counters["steps"] == 2

    run(test)


def test_nothing_is_accepted_while_stopping() -> None:
    async def test(loop: EngineLoop, numbers: Numbers, gone: list[OutputStream]) -> None:
        loop.stopping = True
        with pytest.raises(Unavailable, match="shutting down"):
            await loop.add(feeds(1))

    run(test)
