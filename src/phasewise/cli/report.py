"""`phasewise report`: runs as one page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from phasewise.errors import UserError


def report(
    files: Annotated[list[Path], typer.Argument(metavar="RUN.jsonl...", help="What --out and --record wrote.")],
    out: Annotated[Path, typer.Option(help="The page.")] = Path("report.html"),
    title: Annotated[str, typer.Option(help="Its heading.")] = "phasewise: what was measured",
) -> None:
    """Runs as one self-contained HTML page: who waited how long, both phases of every request, KV bytes, counters.

    It needs no network and prints well. Every figure stands beside the command
    that made it. A recorded load (bench load --record) shows most: the server's
    own events tell every request's phases and what every worker did.

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
