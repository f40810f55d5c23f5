"""Prints results: tables on stdout (Markdown when piped), JSON lines in a file."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from phasewise.cli.options import EngineOptions
from phasewise.errors import UserError


def title(text: str) -> None:
    """Print the heading of a table, with the machine it was measured on."""
    from phasewise.bench.machine import describe

    about = describe()
    print(f"{text}\non {about['cpu']}, {about['cores']} cores, torch {about['torch']}\n")


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from phasewise.bench import report

    if sys.stdout.isatty():
        Console(highlight=False).print(report.table(header, rows))
    else:
        print(report.markdown(header, rows))


def latencies(numbers: Mapping[str, Any]) -> None:
    """Throughput in a line, then TTFT, TPOT and ITL."""
    from phasewise.bench import report

    table(["", "p50", "p90", "p99"], report.latency_rows(numbers))
    print(f"\n{report.throughput_line(numbers)}")


def record(out: Path | None, what: str, engine: EngineOptions, rows: Sequence[Mapping[str, Any]]) -> None:
    """Append rows to a file, each with its command, methods and machine."""
    from phasewise.bench.machine import describe
    from phasewise.bench.report import json_lines

    command = shlex.join(["phasewise", *sys.argv[1:]])
    about = {"bench": what, "command": command, "model": engine.model, "methods": engine.verbs, "machine": describe()}
    json_lines(({**about, **row} for row in rows), out)


def page(path: Path, name: str, section: str, intro: str) -> str:
    """The page with the section of this name in it; one that is not there yet begins with `intro`. Raises UserError
    where the section's markers are broken."""
    from phasewise.bench.report import filled

    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    try:
        return filled(text or intro, name, section)
    except ValueError as error:
        raise UserError(f"{path}: {error}") from error


def batches(text: str) -> list[int]:
    """Numbers of requests at once, from 1,4,8. Raises UserError."""
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < 1 or len(set(found)) < len(found):
        raise UserError(f"batch={text!r}: write different numbers of requests, separated by commas, such as 1,4,8")
    return found
