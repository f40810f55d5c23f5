"""Workers inside the router's own thread: the twin of all other launchers."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast
from weakref import WeakSet

from phasewise.cluster.ownership import OwnershipBuffer
from phasewise.cluster.shared_pool import SharedPool
from phasewise.cluster.transfer_buffer import InlineBuffer, TransferBuffer
from phasewise.cluster.worker import Worker

if TYPE_CHECKING:
    from phasewise.child import Message
    from phasewise.cluster.launcher import Connection, WorkerSpec
    from phasewise.verbs.place import PlacementPlan


class InlineConnection:
    """A connection to a worker in this thread: it obeys at once, and takes its turn when its launcher waits."""

    def __init__(self, name: str, worker: Worker, said: deque[str]) -> None:
        self.name, self.worker = name, worker
        self.alive = True
        self._said = said

    def tell(self, command: Message) -> None:
        if self.alive:
            self.worker.obey(json.loads(json.dumps(command)))

    def hear(self) -> list[Message]:
        heard: list[Message] = [json.loads(text) for text in self._said]
        self._said.clear()
        return heard or [{"event": "alive"}] * self.alive

    def kill(self) -> None:
        self.alive = False


class InlineLauncher:
    """A launcher within one thread: every worker takes a turn per step of the router. The twin of all others."""

    def __init__(self, plan: PlacementPlan) -> None:
        self._plan = plan
        self._shelf = InlineBuffer()
        self._pool: SharedPool | None = None
        self._connections: WeakSet[InlineConnection] = WeakSet()

    @property
    def transfer_buffer(self) -> TransferBuffer:
        return self._shelf if self._pool is None else OwnershipBuffer(self._shelf, self._pool)

    def reserve(self, specs: Sequence[WorkerSpec]) -> None:
        pass

    def launch(self, name: str, spec: WorkerSpec) -> InlineConnection:
        said: deque[str] = deque()
        account, transfer_buffer = None, cast(TransferBuffer, self._shelf.at(name))
        if spec.pooled:
            self._pool = self._pool or SharedPool.here(self._plan.budget)
            account, transfer_buffer = (
                self._pool.account(name, spec.yields),
                OwnershipBuffer(transfer_buffer, self._pool),
            )
        engine = self._plan.engine(spec.phases, spec.share, account)
        worker = Worker(engine, transfer_buffer, lambda event: said.append(json.dumps(event)))
        connection = InlineConnection(name, worker, said)
        self._connections.add(connection)
        return connection

    def wait(self, connections: Sequence[Connection], seconds: float) -> None:
        for connection in connections:
            if isinstance(connection, InlineConnection) and connection.alive:
                connection.worker.turn()

    def close(self) -> None:
        for connection in self._connections:
            connection.worker.engine.close()
