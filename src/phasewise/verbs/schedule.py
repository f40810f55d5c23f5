"""Scheduling is numbers only, with an injected clock, so that a policy can be tested without an engine (DESIGN law 11).

The simulator (plan/simulated_engine.py) steps the same policies over jobs that are numbers; so does
tests/schedule/jobs.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol


class Job(Protocol):
    """The numbers that a scheduler may know of a request. `phasewise.request.request.Request` is one; tests bring their
    own."""

    @property
    def prompt_len(self) -> int: ...
    @property
    def computed(self) -> int: ...
    @property
    def known(self) -> int:
        """Tokens of its prompt and those it has been given."""
        ...

    @property
    def prefilling(self) -> bool: ...
    @property
    def rows(self) -> int:
        """Rows it would like to bring now: the rest of its prompt, or its decode step (draft or block included)."""
        ...

    @property
    def depth(self) -> int:
        """Layers already run for the slice under way, where a step runs part of the depth; 0 = none."""
        ...

    @property
    def layers(self) -> int:
        """Layers of the model it runs through: where `depth` ends."""
        ...

    @property
    def slo(self) -> Any:
        """Its targets `ttft` and `tpot`, seconds; None = no target."""
        ...

    @property
    def arrived(self) -> float:
        """When it came, seconds of the engine's clock, as all times here."""
        ...

    @property
    def first_token(self) -> float | None:
        """When its first token was emitted; None = not yet."""
        ...

    @property
    def last_token(self) -> float | None:
        """When its latest token was emitted; None = it has none."""
        ...


@dataclass(slots=True, eq=False)
class Work:
    """`rows` rows of `job` in this step; `layers` = only this half-open range of the depth.

    A slice under way (job.depth > 0) must go on with the same rows and the next layers.
    """

    job: Any
    rows: int
    layers: tuple[int, int] | None = None


class Scheduler(Protocol):
    """schedule: who runs in this step, with how many rows?

    One that remembers anything has `bind(host)`, like methods of other verbs, so that every engine has its own. Without
    an engine, as in tests, it is given None.
    """

    def plan(self, live: Sequence[Any], now: float) -> list[Work]:
        """`live`: admitted jobs in order of priority (first come first). `now`: seconds of the engine's clock.

        Each job at most once; at least one unless `live` is empty, for nothing else makes time pass.
        """
        ...


class RowBudget:
    """`left` rows to give; whoever wants more than is left gets what is left."""

    def __init__(self, left: int) -> None:
        self.left = left
        self._works: dict[int, Work] = {}  # by the identity of the job

    def give(self, job: Any, rows: int) -> None:
        """Raise what `job` has to `rows` rows, as far as it wants so many and they are left."""
        work = self._works.get(id(job))
        more = min(min(rows, job.rows) - (work.rows if work else 0), self.left)
        if more <= 0:
            return
        if work is None:
            work = self._works[id(job)] = Work(job, 0)
        work.rows += more
        self.left -= more

    @property
    def works(self) -> list[Work]:
        """Everybody who got rows, in the order of their first."""
        return list(self._works.values())
