"""A CSV file that a run writes row by row: flushed at each, and cut back to the resumed step when opened."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path


class Log:
    """The first row's keys are the header. Every row has a "step"; rows beyond the step given here were not saved."""

    def __init__(self, path: Path, step: int) -> None:
        kept: list[list[str]] = []
        if step and path.exists():
            with path.open(newline="") as file:
                kept = [row for row in csv.reader(file) if not row[0].isdigit() or int(row[0]) <= step]
        self.file = path.open("w", newline="")
        self.writer = csv.writer(self.file)
        self.writer.writerows(kept)
        self.empty = not kept
        self.file.flush()

    def row(self, values: Mapping[str, object]) -> None:
        if self.empty:
            self.writer.writerow(values)
            self.empty = False
        self.writer.writerow(values.values())
        self.file.flush()

    def __enter__(self) -> Log:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()
