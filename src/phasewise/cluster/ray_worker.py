"""A worker as a Ray actor: a process somewhere in the cluster that builds its engine from names.

    router --- tell(number, command) ----> command_queue.py -> the worker's thread -> events --- hear() ---> router
                                                        (one `hear` is always under way, answered within PULSE seconds)

A call is made once. If one gets lost with a connection, no later command is obeyed, and `hear` says so after a while:
such a worker is as good as dead.
"""

from __future__ import annotations

import logging
import threading
import time
import warnings
from queue import Empty, SimpleQueue

from phasewise.child import Message
from phasewise.cluster.command_queue import CommandQueue
from phasewise.cluster.engine_spec import Build, EngineSpec
from phasewise.cluster.launcher import WorkerSpec
from phasewise.cluster.process import PULSE, serve, settle
from phasewise.cluster.ray_buffer import RayBuffer
from phasewise.cluster.worker import Worker

log = logging.getLogger(__name__)


class RayWorker:
    """One worker. `tell` and `hear` run in threads of Ray's, the worker in one of its own."""

    def __init__(self, engine_spec: Message, build: Build, spec: Message) -> None:
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")  # parcels are only read
        self._transfer_buffer = RayBuffer()
        self._queue = CommandQueue(self._transfer_buffer)
        self._events: SimpleQueue[Message] = SimpleQueue()
        self._failed: BaseException | None = None
        threading.Thread(target=self._work, args=(engine_spec, build, spec), name="worker", daemon=True).start()

    def tell(self, number: int, command: Message) -> None:
        """Commands are numbered from 0 and may come in any order."""
        self._queue.put(number, command)

    def hear(self, told: int) -> list[Message]:
        """The events since the last call, or none after PULSE seconds: a sign of life. Raises what ended the worker."""
        events: list[Message] = []
        try:
            events.append(self._events.get(timeout=PULSE))
            while True:
                events.append(self._events.get_nowait())
        except Empty:
            pass
        if not events and self._failed is not None:
            raise self._failed
        if self._queue.lost(told, time.monotonic()):
            raise ConnectionError(f"one of the first {told} commands was lost on the way")
        return events

    def _work(self, engine_spec: Message, build: Build, spec: Message) -> None:
        """Build the engine, which may take long, then obey and take turns until the process ends."""
        try:
            kind = WorkerSpec.of(spec)
            settle(kind)
            engine = build(EngineSpec.of(engine_spec)).engine(kind.phases, kind.share)
            serve(Worker(engine, self._transfer_buffer, self._events.put), self._queue.ready)
        except BaseException as error:
            log.exception("the worker has failed")
            self._failed = error
