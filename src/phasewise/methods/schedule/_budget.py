"""What schedulers with a token budget share: the rows of one step, given out in the order they are asked for."""

from __future__ import annotations

from typing import Any

from phasewise.schedule import Work


class Budget:
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
