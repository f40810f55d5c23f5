"""Progress on the terminal: on stderr, so that output can be piped; silent when stderr is not a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn


def console() -> Console:
    return Console(stderr=True, highlight=False)


def say(line: str) -> None:
    """A line about what takes its time where no bar can be shown."""
    print(line, file=sys.stderr, flush=True)


@contextmanager
def working(what: str) -> Iterator[None]:
    """A spinner for something whose length is not known."""
    with console().status(what):
        yield


@contextmanager
def counting(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar; the yielded function takes how many of `total` are done."""
    on = console()
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=on, transient=True, disable=not on.is_terminal) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done: bar.update(task, completed=done)
