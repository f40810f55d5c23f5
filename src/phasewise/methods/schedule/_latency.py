"""Learns how long a step takes from past steps: seconds = a + b * rows."""

from __future__ import annotations

import math

MEMORY = 32  # steps; older ones fade
DOUBT = 1 / 16  # of the mean rows: a spread of rows that says as much as not knowing


class Latency:
    """A line through the steps seen so far: least squares with weights that fade with age. Predicts 0 before the first.

    While all steps are of about the same size, which part of their time is fixed cannot be told; then none of it is
    taken to be. Whoever makes smaller steps for that reason soon knows better.
    """

    def __init__(self) -> None:
        self.steps = 0
        self._rows = self._seconds = 0.0  # fading means ...
        self._variance = self._covariance = 0.0  # ... of the rows, and of both

    def observe(self, rows: int, seconds: float) -> None:
        """Learn from a step of at least one row."""
        self.steps += 1
        weight = max(1 / self.steps, 1 / MEMORY)
        away, slower = rows - self._rows, seconds - self._seconds
        self._rows += weight * away
        self._seconds += weight * slower
        self._variance = (1 - weight) * (self._variance + weight * away * away)
        self._covariance = (1 - weight) * (self._covariance + weight * away * slower)

    def line(self) -> tuple[float, float]:
        """a and b, seconds and seconds per row; neither is negative."""
        if not self.steps:
            return 0.0, 0.0
        most, doubt = self._seconds / self._rows, (DOUBT * self._rows) ** 2
        b = (self._covariance + doubt * most) / (self._variance + doubt)
        b = min(max(b, 0.0), most)
        return self._seconds - b * self._rows, b

    def __call__(self, rows: int, steps: int = 1) -> float:
        """Seconds that `rows` rows take in `steps` steps."""
        a, b = self.line()
        return steps * a + b * rows

    def rows_in(self, seconds: float) -> float:
        """Rows of one step of so many seconds; infinite if rows cost nothing, negative if not even a step fits."""
        a, b = self.line()
        return (seconds - a) / b if b > 0 else math.inf
