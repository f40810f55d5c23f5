"""Work on several cores: the same function over many items, in forked processes."""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import warnings
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import TypeVar

from phasewise.errors import PhasewiseError

T = TypeVar("T")
H = TypeVar("H")


def each(
    items: Sequence[T], work: Callable[[T, H], object], hint: Callable[[], H], processes: int
) -> Iterator[tuple[int, object]]:
    """Yield (place among the items, what `work` gives for it) as the work is done; an error of phasewise's own is given
    instead of being raised. `hint` is asked in this process whenever an item is handed out. Processes are forks, so
    `work` may be any closure; what it gives must be picklable. With one process, or where none can be forked, all is
    done here in order. Raises RuntimeError where a process ends without an answer."""
    if min(processes, len(items)) < 2 or "fork" not in multiprocessing.get_all_start_methods():
        for place, item in enumerate(items):
            yield place, _tried(work, item, hint())
        return
    with _forks(items, work, min(processes, len(items))) as lines:
        queue = iter(range(len(items)))
        busy = {line for line in lines if _hand_out(line, queue, hint)}
        while busy:
            for line in wait(list(busy)):
                assert isinstance(line, Connection)
                try:
                    yield line.recv()
                except EOFError:
                    raise RuntimeError("a process that searched has ended: was there enough memory?") from None
                if not _hand_out(line, queue, hint):
                    busy.remove(line)


def _hand_out(line: Connection, queue: Iterator[int], hint: Callable[[], H]) -> bool:
    place = next(queue, None)
    if place is not None:
        line.send((place, hint()))
    return place is not None


def _tried(work: Callable[[T, H], object], item: T, hint: H) -> object:
    try:
        return work(item, hint)
    except PhasewiseError as error:
        return error


@contextlib.contextmanager
def _forks(items: Sequence[T], work: Callable[[T, H], object], n: int) -> Iterator[list[Connection]]:
    """Lines to `n` processes, which are gone in the end."""
    context = multiprocessing.get_context("fork")
    lines, processes = [], []

    def serve(line: Connection) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # this process's to hear
        with contextlib.suppress(EOFError, BrokenPipeError):
            while True:
                place, hint = line.recv()
                line.send((place, _tried(work, items[place], hint)))

    try:
        for _ in range(n):
            mine, theirs = context.Pipe()
            process = context.Process(target=serve, args=(theirs,), daemon=True)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # of threads: none holds anything that `work` needs
                process.start()
            theirs.close()
            lines.append(mine)
            processes.append(process)
        yield lines
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.join()
