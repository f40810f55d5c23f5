"""Progress on stderr, so that output can be piped: a bar or a spinner on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from rich.console import Console

PAUSE = 10.0  # seconds between two plain lines; work that takes less time prints none


def console() -> Console:
    return Console(stderr=True, highlight=False)


def say(line: str) -> None:
    """Print a line to stderr, for work that takes its time where no bar can be shown."""
    print(line, file=sys.stderr, flush=True)


@dataclass
class ProgressLines:
    """Plain progress lines, at most one every `PAUSE` seconds."""

    started: float = field(default_factory=time.monotonic)
    last: float = field(default_factory=time.monotonic)

    def tell(self, what: str) -> None:
        now = time.monotonic()
        if now - self.last >= PAUSE:
            self.last = now
            say(f"{what} ({now - self.started:.0f} s)")


@contextmanager
def working(what: str) -> Iterator[None]:
    """A spinner for work of unknown length. Nothing outside a terminal."""
    with console().status(what):
        yield


@contextmanager
def telling(what: str) -> Iterator[Callable[[str], None]]:
    """A spinner with a changing text; the yielded function takes the next text."""
    on = console()
    if not on.is_terminal:
        yield ProgressLines().tell
        return
    with on.status(what) as status:
        yield status.update


class Count(Protocol):
    """Takes how many are done, and a word on what was found so far."""

    def __call__(self, done: int, note: str = "") -> None: ...


@contextmanager
def counting_in_lines(what: str, total: int) -> Iterator[Count]:
    """Plain lines, on a terminal too, where several processes tell of their work."""
    lines = ProgressLines()
    yield lambda done, note="": lines.tell(f"{what}: {done} of {total}{', ' * bool(note)}{note}")


@contextmanager
def counting(what: str, total: int) -> Iterator[Count]:
    """A bar, or plain lines; the yielded function takes how many of `total` are done, and a note."""
    on = console()
    if not on.is_terminal:
        with counting_in_lines(what, total) as count:
            yield count
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=on, transient=True) as bar:
        task = bar.add_task(what, total=total)

        def tell(done: int, note: str = "") -> None:
            bar.update(task, completed=done, description=f"{what}, {note}" if note else what)

        yield tell
