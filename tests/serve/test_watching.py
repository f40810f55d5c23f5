"""What listening costs: nothing while nobody does, and never more than a bounded queue for each who does."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest
from fastapi import Request

from phasewise.llm import LLM
from phasewise.request.params import Params
from phasewise.serve.failures import ApiError
from phasewise.serve.guard.keys import KeyRing
from phasewise.serve.loop import EngineLoop, OutputStream
from phasewise.serve.notifier import Notifier
from phasewise.serve.watch import events as module
from phasewise.serve.watch.events import HELD, MOST, Events, Listener
from phasewise.serve.watch.watcher import Watcher
from tests.serve.running import PATIENCE


@asynccontextmanager
async def running(llm: LLM) -> AsyncIterator[EngineLoop]:
    engine = EngineLoop(llm.engine, 8)
    engine.start()
    try:
        async with asyncio.timeout(PATIENCE):
            yield engine
    finally:
        engine.stop()


async def answered(llm: LLM, engine: EngineLoop) -> None:
    """One request from its beginning to its end."""
    feed = OutputStream(
        llm.request(llm.tokenizer.encode("the quick"), Params(max_tokens=5, ignore_eos=True)), Notifier()
    )
    await engine.add([feed])
    while feed.left is None:
        await feed.bell.wait()


def asking() -> Request:
    return Request({"type": "http", "method": "GET", "path": "/events", "headers": []})


def body(events: Events, listener: Listener | None = None) -> AsyncIterator[str]:
    return events._run(listener or Listener(None), asking())


def test_no_work_without_a_listener(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []
    look = Watcher.look

    def counted(self: Watcher, *given: Any) -> None:
        looks.append(1)
        look(self, *given)

    monkeypatch.setattr(Watcher, "look", counted)

    async def scene() -> None:
        async with running(llm) as engine:
            events = Events(engine, 1, None, False)
            await answered(llm, engine)
            assert not looks
            stream = body(events)
            assert (await anext(stream)).startswith("event: hello\n")
            await answered(llm, engine)
            assert len(looks) >= 5
            await cast(Any, stream).aclose()
            await engine.between(lambda: None)
            seen = len(looks)
            await answered(llm, engine)
            assert len(looks) == seen

    asyncio.run(scene())


def test_a_slow_reader_loses_events_and_is_told_how_many() -> None:
    listener = Listener(None)
    for number in range(HELD + 7):
        listener.push(f"{number}\n")
    taken = listener.take()
    assert taken[:-1] == [f"{number}\n" for number in range(HELD)]
    assert taken[-1].startswith("event: dropped\n") and json.loads(taken[-1].partition("data: ")[2]) == {"count": 7}
    assert listener.take() == []


def test_a_key_that_is_taken_back_ends_its_stream(llm: LLM) -> None:
    class Keys:
        known = True

        def find(self, headers: Any) -> None:
            if not self.known:
                raise ApiError(401, "unknown")

    async def scene() -> None:
        keys = Keys()
        async with running(llm) as engine:
            stream = body(Events(engine, 1, cast(KeyRing, keys), False))
            await anext(stream)
            keys.known = False
            assert [part async for part in stream] == []

    asyncio.run(scene())


def test_a_silent_stream_says_that_it_is_alive(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BEAT", 0.01)

    async def scene() -> None:
        async with running(llm) as engine:
            stream = body(Events(engine, 1, None, False))
            parts = [await anext(stream) for _ in range(2)]
            assert parts[-1] == ": nothing new\n\n"
            await cast(Any, stream).aclose()

    asyncio.run(scene())


def test_streams_are_counted_and_end(llm: LLM) -> None:
    async def scene() -> None:
        async with running(llm) as engine:
            events = Events(engine, 1, None, False)
            streams = [body(events) for _ in range(MOST)]
            for stream in streams:
                await anext(stream)
            with pytest.raises(ApiError, match="there may be no more") as caught:
                await events.stream(asking())
            assert caught.value.status == 429
            events.close()
            for stream in streams:
                assert [part async for part in stream] == []
            with pytest.raises(ApiError, match="shutting down"):
                await events.stream(asking())

    asyncio.run(scene())


def test_an_engine_that_breaks_is_told(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise RuntimeError("broken on purpose")

    async def scene() -> None:
        async with running(LLM(llm.name)) as engine:
            monkeypatch.setattr(engine._placed, "step", broken)
            stream = body(Events(engine, 1, None, False))
            await anext(stream)
            await answered(llm, engine)
            told = ""
            while '"left"' not in told:
                told += await anext(stream)
            assert '"how": "failed", "output_tokens": 0' in told and "on purpose" not in told
            await cast(Any, stream).aclose()

    asyncio.run(scene())
