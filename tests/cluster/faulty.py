"""A launcher whose messages about hand-offs get lost, late or doubled; whatever launcher it is made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from phasewise.child import Message
from phasewise.cluster.launcher import Connection, Launcher, WorkerSpec
from phasewise.cluster.transfer_buffer import TransferBuffer

TOLD = ("take", "release", "renew")  # to workers
HEARD = ("offer", "owned", "refused", "expired")  # from workers
Fate = int | str  # rounds to wait, "lose" or "twice"


def unsteady(fates: Sequence[Fate]) -> Callable[[int], Fate]:
    """These fates in turn, but nothing happens to every fifth message, by chance: a link that loses all but every ninth
    may lose one of each attempt for longer than a test lasts."""
    return lambda i: fates[i % len(fates)] if Random(i).randrange(5) else 0


class Faulty:
    """Does to the i-th message of the `kinds` what `fate(i)` says. A round is one step of the router."""

    def __init__(self, launcher: Launcher, fate: Callable[[int], Fate], kinds: Sequence[str] = TOLD + HEARD) -> None:
        self.launcher, self.fate, self.kinds = launcher, fate, kinds
        self.seen = self.round = 0
        self.lost: list[Message] = []
        self.lines: list[Unreliable] = []

    @property
    def transfer_buffer(self) -> TransferBuffer:
        return self.launcher.transfer_buffer

    def reserve(self, specs: Sequence[WorkerSpec]) -> None:
        self.launcher.reserve(specs)

    def launch(self, name: str, spec: WorkerSpec) -> Unreliable:
        self.lines.append(Unreliable(self, self.launcher.launch(name, spec)))
        return self.lines[-1]

    @property
    def late(self) -> list[Message]:
        """What has not arrived yet."""
        return [message for line in self.lines for _, message in [*line.late_commands, *line.late_events]]

    def wait(self, lines: Sequence[Connection], seconds: float) -> None:
        self.round += 1
        for line in self.lines:
            for command in _due(line.late_commands, self.round):
                line.inner.tell(command)
        self.launcher.wait([line.inner for line in lines if isinstance(line, Unreliable)], seconds)

    def close(self) -> None:
        self.launcher.close()

    def passes(self, message: Message, kind: str, late: list[tuple[int, Message]]) -> list[Message]:
        """What arrives now of a message."""
        if kind not in self.kinds:
            return [message]
        fate = self.fate(self.seen)
        self.seen += 1
        if isinstance(fate, int) and fate > 0:
            late.append((self.round + fate, message))
            return []
        if fate == "lose":
            self.lost.append(message)
        return {"lose": [], "twice": [message, message]}.get(str(fate), [message])


class Unreliable:
    """A line that loses, delays and doubles messages."""

    def __init__(self, launcher: Faulty, inner: Connection) -> None:
        self.launcher, self.inner, self.name = launcher, inner, inner.name
        self.late_commands: list[tuple[int, Message]] = []
        self.late_events: list[tuple[int, Message]] = []

    @property
    def alive(self) -> bool:
        return self.inner.alive

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)  # worker, pid

    def tell(self, command: Message) -> None:
        for passed in self.launcher.passes(command, command["do"], self.late_commands):
            self.inner.tell(passed)

    def hear(self) -> list[Message]:
        heard = _due(self.late_events, self.launcher.round)
        for event in self.inner.hear():
            heard += self.launcher.passes(event, event["event"], self.late_events)
        return heard

    def kill(self) -> None:
        self.inner.kill()


def _due(late: list[tuple[int, Message]], now: int) -> list[Message]:
    found = [message for round, message in late if round <= now]
    late[:] = [entry for entry in late if entry[0] > now]
    return found
