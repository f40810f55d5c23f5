"""KV events on the wire: what an engine caches is heard by whoever reads vLLM's format, and nothing breaks a reader."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from phasewise.engine.engine import Engine
from phasewise.errors import UserError
from phasewise.kv.events import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent, KVEventLog, packed, unpacked
from phasewise.request.request import Request
from phasewise.serve.route.index import PrefixIndex
from phasewise.serve.route.kv_listener import KVListener
from phasewise.serve.watch.kv_publisher import TOPIC, KVPublisher, publisher
from tests import tiny

msgpack: Any = pytest.importorskip("msgpack")
zmq: Any = pytest.importorskip("zmq")
EVENTS: list[KVEvent] = [
    BlockStored([b"a" * 16, b"b" * 16], None, list(range(64)), 32), BlockStored([7], b"b" * 16, list(range(32)), 32),
    BlockRemoved([7]), AllBlocksCleared(),
]  # fmt: skip
ENDPOINT = "tcp://server:1"


def caching(engine: Engine, prompt: list[int]) -> None:
    request = Request(prompt, tiny.greedy(1))
    engine.add(request)
    while request.left is None:
        engine.step()


def test_an_engine_tells_what_it_caches() -> None:
    engine = tiny.engine()
    assert isinstance(engine, Engine)
    heard: list[KVEvent] = []
    engine.prefixes.events.subscribe(heard.append)
    first, second = tiny.prompts(100, 40)
    caching(engine, first)
    caching(engine, first[:64] + second)
    stored, more = heard
    assert isinstance(stored, BlockStored) and isinstance(more, BlockStored)
    assert (len(stored.block_hashes), stored.parent_block_hash, stored.block_size) == (3, None, 32)
    assert stored.token_ids == first[:96] and more.token_ids == second[:32]
    assert more.parent_block_hash == stored.block_hashes[1], "behind what was there"
    engine.forget_prefixes()
    gone = {name for event in heard[2:-1] if isinstance(event, BlockRemoved) for name in event.block_hashes}
    assert gone == {*stored.block_hashes, *more.block_hashes} and isinstance(heard[-1], AllBlocksCleared)


def test_a_batch_is_what_vllm_publishes() -> None:
    assert [tuple(event) for event in unpacked(packed(EVENTS))] == [tuple(event) for event in EVENTS]
    when, events = msgpack.unpackb(packed(EVENTS, 1.5))
    assert when == 1.5 and events[0] == [
        "BlockStored",
        [b"a" * 16, b"b" * 16],
        None,
        list(range(64)),
        32,
        None,
        None,
        None,
    ]
    assert events[2] == ["BlockRemoved", [7], None] and events[3] == ["AllBlocksCleared"]
    newer = msgpack.packb([1.5, [["BlockStored", [5], None, [1, 2], 2, None, "GPU", None, [None], 0], ["Moved", 3]], 0])
    assert unpacked(newer) == [BlockStored([5], None, [1, 2], 2)], (
        "fields and events that are not known are passed over"
    )


@pytest.mark.parametrize("batch", [b"", b"\xc1", msgpack.packb(3), msgpack.packb([1.0]), msgpack.packb([1.0, 3])])
def test_what_is_no_batch_is_passed_over(batch: bytes) -> None:
    index = PrefixIndex()
    listener = KVListener({ENDPOINT: index})
    listener.heard(ENDPOINT, [TOPIC, bytes(8), packed(EVENTS[:1])])
    listener.heard(ENDPOINT, [TOPIC, (1).to_bytes(8, "big"), batch])
    listener.heard(ENDPOINT, [batch])
    assert index.blocks == 2


def test_a_reader_that_has_missed_something_begins_anew() -> None:
    index = PrefixIndex()
    listener = KVListener({ENDPOINT: index})
    for number, event in ((0, EVENTS[0]), (1, EVENTS[1])):
        listener.heard(ENDPOINT, [b"", number.to_bytes(8, "big"), packed([event])])
    whole = [*range(64), *range(32)]
    assert index.cached([*whole, 1]) == 96 and index.cached(whole[:70]) == 64
    listener.heard(ENDPOINT, [b"", (3).to_bytes(8, "big"), packed([EVENTS[1]])])
    assert index.cached(whole) == 0, "its parent is not known any more"


def test_nobody_listens_and_nothing_is_kept() -> None:
    log = KVEventLog()
    assert not log and log.take() == []
    log.collect()
    log.tell(EVENTS[3])
    assert log and log.take() == [EVENTS[3]] and log.take() == []


@pytest.fixture
def published() -> Iterator[tuple[KVEventLog, KVPublisher]]:
    log = KVEventLog()
    made = KVPublisher(log, "tcp://127.0.0.1:*")
    yield log, made
    made.close()


def test_it_is_heard_over_zeromq(published: tuple[KVEventLog, KVPublisher]) -> None:
    log, made = published
    socket = zmq.Context.instance().socket(zmq.SUB)
    socket.setsockopt(zmq.RCVTIMEO, 100)
    socket.setsockopt(zmq.SUBSCRIBE, TOPIC)
    socket.connect(made.endpoint)
    index, end = PrefixIndex(), time.monotonic() + 20
    listener = KVListener({ENDPOINT: index})
    try:
        while not index.blocks:  # whoever subscribes misses what comes before the connection stands
            assert time.monotonic() < end
            log.tell(EVENTS[0])
            try:
                listener.heard(ENDPOINT, socket.recv_multipart())
            except zmq.Again:
                continue
    finally:
        socket.close(linger=0)
    assert index.cached(range(65)) == 64
    with pytest.raises(UserError, match="--kv-events tcp://127.0.0.1"):
        KVPublisher(KVEventLog(), made.endpoint)


def test_where_there_are_none_it_is_said() -> None:
    placed = tiny.engine({"place": "replicated"}, cluster="inline")
    try:
        with pytest.raises(UserError, match="placement"):
            publisher(placed, "tcp://127.0.0.1:*", False)
    finally:
        placed.close()
    with pytest.raises(UserError, match="--sleep-after"):
        publisher(tiny.engine(), "tcp://127.0.0.1:*", True)
