"""Commands of an actor in the order of their numbers, each held until what it carries has come.

Ray may run the calls of an actor in any order, and fetches an object only when asked. A worker must not wait for the
network while it could compute, so a command with a parcel is held back until that is here, and with it what is told
later about the same request; everything else passes by.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from queue import SimpleQueue
from typing import Protocol

from phasewise.child import Message
from phasewise.cluster.transfer_buffer import Parcel

LATE = 5.0  # seconds that a command may take longer than one told after it
GLANCE = 0.1  # seconds between two looks at what is to be fetched


class Fetcher(Protocol):
    """A transfer buffer whose parcels take their time."""

    def here(self, parcels: Sequence[Parcel], seconds: float) -> bool:
        """Start to fetch them all; whether one of them is here, or lost, within so many seconds."""
        ...


class CommandQueue:
    """Takes numbered commands from any thread; what may be obeyed is in `ready`."""

    def __init__(self, fetcher: Fetcher) -> None:
        self.ready: SimpleQueue[Message | None] = SimpleQueue()
        self._fetcher = fetcher
        self._next = 0  # the number to go on with
        self._early: dict[int, Message] = {}
        self._held: dict[str, deque[Message]] = {}  # by request; the first of each waits for its parcel
        self._missed: tuple[int, float] | None = None  # the number that was missing when last asked, and since when
        self._news = threading.Condition()
        threading.Thread(target=self._fetch, name="fetcher", daemon=True).start()

    def put(self, number: int, command: Message) -> None:
        """Commands are numbered from 0; none comes twice."""
        with self._news:
            self._early[number] = command
            while self._next in self._early:
                self._sort(self._early.pop(self._next))
                self._next += 1

    def lost(self, told: int, now: float) -> bool:
        """Returns whether one of the first `told` commands has been missing too long, by the caller's clock."""
        with self._news:
            if self._next >= told:
                self._missed = None
            elif self._missed is None or self._missed[0] != self._next:
                self._missed = self._next, now
            return self._missed is not None and now - self._missed[1] > LATE

    def _sort(self, command: Message) -> None:
        name, here = command.get("id"), self._here(command)
        if name in self._held:
            self._held[name].append(command)
        elif here:
            self.ready.put(command)
        else:
            self._held[command["id"]] = deque([command])
            self._news.notify()

    def _here(self, command: Message) -> bool:
        return "parcel" not in command or self._fetcher.here([command["parcel"]], 0.0)

    def _fetch(self) -> None:
        while True:
            with self._news:
                self._news.wait_for(lambda: self._held)
                parcels = [queue[0]["parcel"] for queue in self._held.values()]
            self._fetcher.here(parcels, GLANCE)
            del parcels  # or they would be kept
            with self._news:
                for name, queue in list(self._held.items()):
                    while queue and self._here(queue[0]):
                        self.ready.put(queue.popleft())
                    if not queue:
                        del self._held[name]
