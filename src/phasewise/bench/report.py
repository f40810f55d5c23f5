"""Results for people and programs: a table on the terminal, Markdown, JSON lines."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from rich.table import Table

Numbers = Mapping[str, Any]
T = TypeVar("T")


def json_lines(rows: Iterable[Numbers], path: Path | None) -> None:
    """Append one JSON object per row to `path`; without a path, nothing."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(rounded(row)) + "\n" for row in rows)


def rounded(row: Numbers) -> dict[str, Any]:
    """The row with floats to six significant digits."""
    return {key: float(f"{value:.6g}") if isinstance(value, float) else value for key, value in row.items()}


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; all columns but the first are aligned to the right."""
    lines = ["| " + " | ".join(header) + " |", "|---|" + "---:|" * (len(header) - 1)]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines)


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """The same for the terminal."""
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for i, column in enumerate(header):
        made.add_column(column, justify="right" if i else "left", no_wrap=not i, overflow="fold")
    for row in rows:
        made.add_row(*row)
    return made


def latency_rows(numbers: Numbers) -> list[list[str]]:
    """TTFT, TPOT and ITL in milliseconds, one row each: p50, p90, p99."""
    names = ("ttft", "tpot", "itl")
    return [[name.upper(), *(milliseconds(numbers[f"{name}_p{q}_s"]) for q in (50, 90, 99))] for name in names]


def throughput_line(numbers: Numbers) -> str:
    line = (
        f"{numbers['requests']} requests ({numbers['failed']} failed), {numbers['prompt_tokens']} prompt and "
        f"{numbers['output_tokens']} output tokens in {numbers['seconds']:.2f} s: "
        f"{short(numbers['output_tokens_per_s'])} output tokens/s, {short(numbers['total_tokens_per_s'])} in all, "
        f"{short(numbers['requests_per_s'])} requests/s"
    )
    if "goodput_per_s" in numbers:
        share = f"{numbers['good_share']:.0%} within the targets"
        line += f"; goodput {short(numbers['goodput_per_s'])} requests/s ({share})"
    return line


def milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{short(seconds * 1e3)} ms"


def short(value: float | None) -> str:
    """Three significant digits, no exponent."""
    if value is None:
        return "-"
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def size(n: float) -> str:
    """Bytes with a unit."""
    for unit in ("B", "KiB", "MiB"):
        if abs(n) < 1024:
            return f"{short(n)} {unit}"
        n /= 1024
    return f"{short(n)} GiB"


def filled(page: str, name: str, section: str) -> str:
    """`page` with the section of this name replaced, or added at the end.

    Raises ValueError where the markers of the section are not there once each.
    """
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    body = f"{begin}\n{section.strip()}\n{end}"
    if begin not in page and end not in page:
        return f"{page.rstrip()}\n\n{body}\n"
    if page.count(begin) != 1 or page.count(end) != 1 or page.index(begin) > page.index(end):
        raise ValueError(f"the page must hold {begin} and, after it, {end}, once each")
    before, rest = page.split(begin)
    return f"{before}{body}{rest.split(end)[1]}"


def unique(items: Iterable[T]) -> list[T]:
    """Each once, in the order of their first."""
    return list(dict.fromkeys(items))


def write_csv(path: Path, lines: Sequence[Numbers]) -> None:
    """The file anew: a header, and a line each. All have the columns of the first; there must be one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(lines[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)
