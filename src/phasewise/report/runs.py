"""Files of results, as the benchmarks write them (`--out`, `--record`): JSON lines."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from phasewise.errors import UserError
from phasewise.report.lives import Recording, recording

Row = Mapping[str, Any]


@dataclass
class RecordedRun:
    """The content of one file. `rows` by their benchmark; `served` and `events` of a recorded load."""

    name: str
    rows: dict[str, list[Row]] = field(default_factory=dict)
    served: list[Row] = field(default_factory=list)
    events: list[Row] = field(default_factory=list)

    def commands(self, bench: str) -> list[str]:
        """The commands that made those rows, each once."""
        return list(dict.fromkeys(row["command"] for row in self.rows.get(bench, []) if "command" in row))

    def about(self, bench: str) -> Row:
        return self.rows[bench][-1]

    @cached_property
    def recording(self) -> Recording | None:
        return recording(self.events)


def read(paths: Sequence[Path]) -> list[RecordedRun]:
    """Raises UserError for a file that cannot be read, or is none of these."""
    return [_read(path) for path in paths]


def _read(path: Path) -> RecordedRun:
    run = RecordedRun(path.stem)
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise UserError(f"{path}, line {number}, is no JSON ({error}): a report reads what --out wrote") from error
        if not isinstance(row, dict) or not row.keys() & {"bench", "served", "event"}:
            raise UserError(f"{path}, line {number}, is of no benchmark: a report reads what --out and --record wrote")
        if "bench" in row:
            run.rows.setdefault(str(row["bench"]), []).append(row)
        else:
            (run.served if "served" in row else run.events).append(row)
    if not run.rows:
        raise UserError(f"{path} has no results: give a file that `phasewise bench ... --out` wrote")
    return run
