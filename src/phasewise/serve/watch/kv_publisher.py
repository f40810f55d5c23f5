"""Publishes an engine's KV events over ZeroMQ, as vLLM does: topic, number of the batch, batch (`kv/events.py`)."""

from __future__ import annotations

import threading
from typing import Any

from phasewise.engine.engine import Engine
from phasewise.errors import UserError
from phasewise.kv.events import KVEventLog, packed
from phasewise.verbs.place import Placed

TOPIC = b"kv-events"
EVERY = 0.01  # seconds between two batches at most
QUEUE = 100_000  # batches that a slow subscriber may be behind before it misses some


class KVPublisher:
    """A thread that binds `endpoint`, such as tcp://127.0.0.1:5557, and publishes what the log tells. Raises UserError
    where it cannot."""

    def __init__(self, log: KVEventLog, endpoint: str) -> None:
        try:
            import zmq
        except ImportError as error:
            raise UserError(f"KV events need the extra ({error}): pip install 'phasewise[kv-events]'") from error
        packed([])  # the other half of the extra
        self._log, self._number = log, 0
        self._socket: Any = zmq.Context.instance().socket(zmq.PUB)
        self._socket.set_hwm(QUEUE)
        try:
            self._socket.bind(endpoint)
        except zmq.ZMQError as error:
            self._socket.close(linger=0)
            raise UserError(f"--kv-events {endpoint}: {error}; give one such as tcp://127.0.0.1:5557") from error
        self.endpoint = str(self._socket.getsockopt_string(zmq.LAST_ENDPOINT))
        self._over = threading.Event()
        log.collect()
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._over.wait(EVERY):
            self._publish()
        self._publish()
        self._socket.close(linger=1000)

    def _publish(self) -> None:
        events = self._log.take()
        if events:
            self._socket.send_multipart([TOPIC, self._number.to_bytes(8, "big"), packed(events)])
            self._number += 1

    def close(self) -> None:
        """Publish what is left, and let go of the endpoint."""
        self._over.set()
        self._thread.join()


def publisher(engine: Placed, endpoint: str, sleeps: bool) -> KVPublisher:
    """Publishes an engine's KV events. Raises UserError where its prefixes lie in workers, or do not stay the same."""
    if not isinstance(engine, Engine):
        raise UserError("--kv-events tells of one engine's prefixes, and those of a placement lie in its workers: "
                        "leave --kv-events out, or --place")  # fmt: skip
    if sleeps:
        raise UserError("--kv-events and --sleep-after exclude each other: leave one out")
    return KVPublisher(engine.prefixes.events, endpoint)
