"""`phasewise report`: draws runs into one HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from phasewise.errors import UserError


def report(
    files: Annotated[
        list[Path], typer.Argument(metavar="RUN.jsonl...", help="Files that --out and --record have written.")
    ],
    out: Annotated[Path, typer.Option(help="File for the page.")] = Path("report.html"),
    title: Annotated[str, typer.Option(help="Heading of the page.")] = "phasewise: what was measured",
) -> None:
    """Draw runs into one self-contained HTML page: waits, both phases of every request, KV bytes, counters.

    The page needs no network. Every figure stands beside the command that made
    it. A run recorded by `bench load --record` shows the most, because it holds
    the server's own events: every request's phases and every worker's steps.

    [bold]Examples[/]

      phasewise bench load --rate 8 --requests 100 --record run.jsonl && phasewise report run.jsonl
      phasewise report colocated.jsonl disaggregated.jsonl goodput.jsonl --out comparison.html
    """
    from phasewise.report.page import page
    from phasewise.report.runs import read

    text = page(title, read(files))
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{out} cannot be written: {error}") from error
    print(f"{out}: {len(text) / 1024:.0f} KiB")
