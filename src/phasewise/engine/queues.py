"""The queues of an engine: every request is in exactly one of them, and each is in order of importance."""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from phasewise.request.request import Request
    from phasewise.verbs.schedule import Work


class Queues:
    """`waiting` hold no KV, `running` hold theirs and share the steps, `departed` hold theirs until a placement takes
    them away. The smaller `Params.priority` goes first; among equals, first come is first served."""

    def __init__(self) -> None:
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.departed: list[Request] = []
        self._rank: dict[Request, tuple[int, int]] = {}
        self._ids: set[str] = set()
        self._next = 0

    def __len__(self) -> int:
        return len(self._rank)

    def __contains__(self, request: Request) -> bool:
        return request in self._rank

    def named(self, request_id: str) -> bool:
        """True if a request of this id is here."""
        return request_id in self._ids

    def rank(self, request: Request) -> tuple[int, int]:
        """Its priority, and the order of arrival; smaller is more important."""
        return self._rank[request]

    def ordered(self, works: Sequence[Work]) -> list[Work]:
        """Work of the most important requests first."""
        return sorted(works, key=lambda work: self._rank[work.job]) if len(works) > 1 else list(works)

    def join(self, request: Request, queue: list[Request]) -> None:
        """A new request, the last of its priority."""
        self._rank[request] = (request.params.priority, self._next)
        self._ids.add(request.id)
        self._next += 1
        insort(queue, request, key=self.rank)

    def move(self, request: Request, queue: list[Request]) -> None:
        """From wherever it is to its place in `queue`."""
        self._take(request)
        insort(queue, request, key=self.rank)

    def drop(self, request: Request) -> None:
        """Forget a request; nothing happens if it is not here."""
        self._take(request)
        if self._rank.pop(request, None) is not None:
            self._ids.remove(request.id)

    def _take(self, request: Request) -> None:
        for queue in (self.running, self.waiting, self.departed):
            if request in queue:
                queue.remove(request)
