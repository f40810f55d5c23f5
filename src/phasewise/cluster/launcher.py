"""The protocols of launchers, which start workers, and of the connection to each worker: commands go out, events come
back, in order, until the worker dies.

Both are plain data (JSON carries them); tensors travel through a transfer buffer and are named by parcels. Workers may
run inside the router's own thread (inline.py), in processes of their own (process.py) or on other machines
(ray_backend.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from phasewise.child import Message
from phasewise.cluster.transfer_buffer import TransferBuffer


@dataclass(frozen=True)
class WorkerSpec:
    """A kind of worker: the phases its engine runs, its share of the KV budget, its cores (None = any) and threads
    (None = one per core). `pooled`: all such workers share the whole budget, and lend KV instead of sending it; those
    that compute prompts only make way for the others."""

    role: str
    phases: tuple[str, ...]
    share: float
    cores: tuple[int, ...] | None = None
    threads: int | None = None
    pooled: bool = False

    @property
    def decodes(self) -> bool:
        """Requests go on there when their prompts are done. Where they do not, all of them depart."""
        return "decode" in self.phases

    @property
    def yields(self) -> bool:
        return not self.decodes

    @property
    def n_threads(self) -> int | None:
        """Threads that it runs on: one per core of its own, where it has some. None: one per core of the machine."""
        return self.threads if self.cores is None else len(self.cores)

    @classmethod
    def of(cls, plain: Message) -> WorkerSpec:
        """The spec of `asdict`, which may have travelled as JSON."""
        known: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in plain.items()}
        return cls(**known)


class Connection(Protocol):
    """A worker as the router sees it."""

    name: str

    @property
    def alive(self) -> bool:
        """False once the worker is known to be dead. What it said before may still be heard."""
        ...

    def tell(self, command: Message) -> None:
        """Send a command. Never blocks; what a dead worker is told is lost."""
        ...

    def hear(self) -> list[Message]:
        """The events that have come since. Never blocks."""
        ...

    def kill(self) -> None:
        """End the worker at once, whatever it does."""
        ...


class Launcher(Protocol):
    """Starts workers, and waits for what they say."""

    @property
    def transfer_buffer(self) -> TransferBuffer: ...

    def reserve(self, specs: Sequence[WorkerSpec]) -> None:
        """Announce the workers that are launched first and kept up, so that hosts can be chosen for all together."""
        ...

    def launch(self, name: str, spec: WorkerSpec) -> Connection:
        """A new worker. Names are never used twice."""
        ...

    def wait(self, connections: Sequence[Connection], seconds: float) -> None:
        """Return when one of the connections has events or died, or after `seconds`."""
        ...

    def close(self) -> None:
        """Dismiss everybody and free what they left."""
        ...
