"""A worker as a Ray actor: a process somewhere in the cluster that builds its engine from names.

    router --- tell(number, command) ----> mail.py -> the worker's thread -> events --- hear() ---> router
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

from phasewise.cluster.line import Message, Spec
from phasewise.cluster.mail import Mail
from phasewise.cluster.objects import Objects
from phasewise.cluster.process import PULSE, serve, settle
from phasewise.cluster.source import Source
from phasewise.cluster.worker import Worker

log = logging.getLogger(__name__)


class Actor:
    """One worker. `tell` and `hear` run in threads of Ray's, the worker in one of its own."""

    def __init__(self, source: Message, spec: Message) -> None:
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")  # parcels are only read
        self._depot = Objects()
        self._mail = Mail(self._depot)
        self._events: SimpleQueue[Message] = SimpleQueue()
        self._failed: BaseException | None = None
        threading.Thread(target=self._work, args=(source, spec), name="worker", daemon=True).start()

    def tell(self, number: int, command: Message) -> None:
        """Commands are numbered from 0 and may come in any order."""
        self._mail.put(number, command)

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
        if self._mail.lost(told, time.monotonic()):
            raise ConnectionError(f"one of the first {told} commands was lost on the way")
        return events

    def _work(self, source: Message, spec: Message) -> None:
        """Build the engine, which may take long, then obey and take turns until the process ends."""
        try:
            kind = Spec.of(spec)
            settle(kind)
            engine = Source.of(source).build().engine(kind.phases, kind.share)
            serve(Worker(engine, self._depot, self._events.put), self._mail.ready)
        except BaseException as error:
            log.exception("the worker has failed")
            self._failed = error
