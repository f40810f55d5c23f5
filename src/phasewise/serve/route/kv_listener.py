"""Hears servers' KV events over ZeroMQ, in the format in which vLLM publishes them (`kv/events.py`)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

from phasewise.errors import UserError
from phasewise.kv.events import unpacked
from phasewise.serve.route.index import PrefixIndex

log = logging.getLogger(__name__)


class KVListener:
    """`indexes`: by the endpoint of its server. Batches are numbered; where one is missing the index begins anew, for
    what it says may no longer be so."""

    def __init__(self, indexes: Mapping[str, PrefixIndex]) -> None:
        self._zmq = zmq()
        self._indexes = indexes
        self._last = dict.fromkeys(indexes, -1)

    async def run(self) -> None:
        """Listen until cancelled."""
        await asyncio.gather(*(self._hear(endpoint) for endpoint in self._indexes))

    async def _hear(self, endpoint: str) -> None:
        context = self._zmq.asyncio.Context.instance()
        socket = context.socket(self._zmq.SUB)
        socket.setsockopt(self._zmq.SUBSCRIBE, b"")
        try:
            socket.connect(endpoint)
        except self._zmq.ZMQError as error:
            raise UserError(f"--kv-events {endpoint}: {error}") from error
        try:
            while True:
                self.heard(endpoint, await socket.recv_multipart())
        finally:
            socket.close(linger=0)

    def heard(self, endpoint: str, frames: list[bytes]) -> None:
        """A message: topic, number (8 bytes, big-endian), batch. What is none is passed over, and logged."""
        index = self._indexes[endpoint]
        try:
            _, number, batch = frames
            sequence, events = int.from_bytes(number, "big"), unpacked(batch)
        except ValueError as error:
            log.warning("%s: %s", endpoint, error)
            return
        if sequence != self._last[endpoint] + 1:
            index.clear()
        self._last[endpoint] = sequence
        for event in events:
            index.apply(event)


def zmq() -> Any:
    """The package. Raises UserError without the extra."""
    try:
        import zmq
        import zmq.asyncio
    except ImportError as error:
        raise UserError(f"KV events need the extra ({error}): pip install 'phasewise[kv-events]'") from error
    return zmq
