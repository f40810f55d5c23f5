"""Progress of a fetch: a bar on a terminal, else a line per stage."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

Say = Callable[[str], object]


def megabytes(size: int) -> str:
    """A size as it is written for people, in millions of bytes: 92.9 MB."""
    return f"{size / 1e6:.1f} MB" if size < 100e6 else f"{size / 1e6:.0f} MB"


@dataclass
class Stages:
    """The stage of a fetch (`downloading`), and its bytes."""

    model: str
    say: Say
    bar: Progress
    task: TaskID
    now: str = ""

    def at(self, stage: str, done: int = 0, total: int | None = None) -> None:
        """`done` of `total` bytes of a stage; a new stage is said. Without a total nobody knows how long it takes."""
        text = f"{self.model}: {stage}"
        if stage != self.now:
            self.now = stage
            self.bar.reset(self.task, description=text, total=total)
            if self.bar.disable:
                self.say(text if total is None else f"{text} ({megabytes(total)})")
        self.bar.update(self.task, completed=done)


@contextmanager
def stages(model: str, say: Say) -> Iterator[Stages]:
    """A bar on stderr if that is a terminal; else `say` gets a line per stage."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
    from rich.progress import TransferSpeedColumn as SpeedColumn

    on = Console(stderr=True, highlight=False)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), SpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=on, transient=True, disable=not on.is_terminal) as bar:
        yield Stages(model, say, bar, bar.add_task(model, total=None))
