"""Requests whose first token cannot come in time are refused at once, so that those that are taken are served in time.

How long a newcomer will wait is told from what is ahead of it: prompts without a token yet, of which one after the
other gets its first. The time between two of these, less the time in which nobody waited, is measured all the while, by
the prompt's length; and if the next one is overdue, whoever comes waits longer by that.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from phasewise.serve.failures import ApiError
from phasewise.serve.loop import OutputStream

MEMORY = 32  # first tokens; older ones fade
AIM = 0.7  # of the target: prompts differ, and steps do
DOUBT = 2.0  # standard deviations of what is measured
BASE = 64  # tokens: what a request costs, however short its prompt is


class PendingRequest(Protocol):
    """A request that was taken, as far as it matters here."""

    @property
    def arrived(self) -> float: ...
    @property
    def size(self) -> int:
        """Tokens of its prompt."""
        ...

    @property
    def first_token(self) -> float | None:
        """When it came."""
        ...

    @property
    def over(self) -> bool:
        """True if the sequence has left the engine."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class FirstSequence:
    """The first sequence of an answer; its samples begin together."""

    feed: OutputStream

    @property
    def arrived(self) -> float:
        return self.feed.arrived

    @property
    def size(self) -> int:
        return self.feed.request.prompt_len

    @property
    def first_token(self) -> float | None:
        return self.feed.request.first_token

    @property
    def over(self) -> bool:
        return self.feed.left is not None


class SLOAdmission:
    """Keeps count of requests without a token. Times are those of `clock`, which is the engine's."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ahead: deque[PendingRequest] = deque()
        self._last = -math.inf  # when the latest first token came
        self._seen = 0
        self._seconds = self._tokens = 0.0  # means of the time between first tokens while somebody waited, and of sizes
        self._error = 0.0  # mean square, seconds

    def admit(self, target: float | None, size: int = 1) -> None:
        """Raises ApiError 429 for a request of `size` tokens whose first token would come later than `target` seconds
        from now; one that nobody is ahead of is always taken, for nothing would be learned otherwise."""
        if target is None:
            return
        self._learn()
        wait = self.wait(size)
        if self._ahead and wait > AIM * target:
            raise ApiError(
                429, f"{len(self._ahead)} requests are ahead of this one, and its first token would come in "
                f"{wait:.2f} s instead of the {target:g} s that are its target: try again later, or allow more",
                "slo", "too_late", retry=wait - AIM * target,
            )  # fmt: skip

    def took(self, request: PendingRequest) -> None:
        """It has been taken."""
        self._ahead.append(request)

    @contextmanager
    def admitted(self, request: PendingRequest, target: float | None) -> Iterator[None]:
        """Raises what `admit` raises; inside it is handed over, and ahead of others from now on, unless that fails."""
        self.admit(target, request.size)
        self.took(request)
        try:
            yield
        except BaseException:
            if request in self._ahead:
                self._ahead.remove(request)
            raise

    def wait(self, size: int) -> float:
        """Seconds until the first token of a request of `size` tokens that comes now, on the safe side."""
        turns, tokens = len(self._ahead) + 1, sum(one.size + BASE for one in self._ahead) + size + BASE
        overdue = 0.0
        if self._ahead:
            head = self._ahead[0]
            overdue = self._clock() - max(self._last, head.arrived) - self._pace * (head.size + BASE)
        return max(0.0, overdue) + tokens * self._pace + DOUBT * math.sqrt(self._error * turns)

    @property
    def _pace(self) -> float:
        """Seconds per token."""
        return self._seconds / self._tokens if self._tokens else 0.0

    def _learn(self) -> None:
        """From those that got their first token, or left without, since the last time."""
        came = sorted((at, one.arrived, one.size) for one in self._ahead if (at := one.first_token) is not None)
        self._ahead = deque(one for one in self._ahead if one.first_token is None and not one.over)
        for at, arrived, size in came:
            gap = max(0.0, at - max(self._last, arrived))
            self._last = max(self._last, at)
            self._seen += 1
            weight = max(1 / self._seen, 1 / MEMORY)
            miss = gap - self._pace * (size + BASE) if self._seen > 1 else 0.0
            self._seconds += weight * (gap - self._seconds)
            self._tokens += weight * (size + BASE - self._tokens)
            self._error += weight * (miss * miss - self._error)
