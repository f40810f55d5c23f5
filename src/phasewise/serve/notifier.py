"""Tells the event loop that something has arrived for an answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Notifier:
    """Rung on the event loop, whenever something arrived; at most one task waits for it.

    `at_once`, if set, is called instead of waking the task that waits: it does what there is to do and returns True, or
    leaves it to the task. It is never called while that task is busy with what arrived before, and must not raise.
    """

    __slots__ = ("_rung", "_waiter", "at_once")

    def __init__(self) -> None:
        self.at_once: Callable[[], bool] | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._rung = False

    def ring(self) -> None:
        waiter = self._waiter
        if waiter is None or waiter.done():
            self._rung = True
        elif self.at_once is None or not self.at_once():
            waiter.set_result(None)

    async def wait(self) -> None:
        """Until it is rung, or was since the last wait."""
        if not self._rung:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        self._rung = False
