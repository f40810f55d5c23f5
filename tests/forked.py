"""Processes that are forked from an interpreter in which torch and the server are imported already.

A fresh interpreter takes seconds of CPU time to import them, and a fork takes milliseconds. The interpreter is the fork
server of `multiprocessing`: one per test process, with a single thread, and it never ran a parallel region of torch.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from multiprocessing.forkserver import ensure_running
from multiprocessing.util import get_temp_dir
from pathlib import Path
from typing import IO

ROOT = Path(__file__).parents[1]
PRELOAD = ["tests.preloaded"]
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}"}


@cache
def _context() -> ForkServerContext:
    """The fork server of this test process, started once."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    before, scratch = dict(os.environ), tempfile.tempdir
    os.environ.update(ENVIRONMENT)
    tempfile.tempdir = os.environ.get("PYTEST_DEBUG_TEMPROOT")  # of its socket, which outlives the tests' own folder
    try:
        get_temp_dir()
        ensure_running()
    finally:
        tempfile.tempdir = scratch
        os.environ.clear()
        os.environ.update(before)
    return context


def _main(
    target: Callable[..., None], arguments: tuple[object, ...], environment: dict[str, str], out: Connection,
    errors: Connection,
) -> None:  # fmt: skip
    """Run `target` in the forked process, with this environment and these streams."""
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(ROOT)
    os.dup2(out.fileno(), sys.stdout.fileno())
    os.dup2(errors.fileno(), sys.stderr.fileno())
    out.close(), errors.close()
    target(*arguments)


class Forked:
    """Calls `target(*arguments)` in a process of its own; used like `subprocess.Popen` with a pipe as its stdout.

    `errors`: the file that takes stderr; without one, `communicate` returns what was written to it.
    """

    def __init__(self, target: Callable[..., None], *arguments: object, errors: IO[str] | None = None) -> None:
        self._errors = errors or tempfile.TemporaryFile("w+")  # noqa: SIM115  (a pipe that nobody reads fills up)
        reads, writes = os.pipe()
        self.stdout = os.fdopen(reads)
        environment = dict(os.environ) | ENVIRONMENT
        with (
            Connection(writes, readable=False) as out,
            Connection(os.dup(self._errors.fileno()), readable=False) as err,
        ):
            given = (target, arguments, environment, out, err)
            self._process = _context().Process(target=_main, args=given, daemon=True)
            self._process.start()
        self.pid = int(self._process.pid or 0)

    def poll(self) -> int | None:
        """The exit code, or minus the signal that ended it; None while it runs."""
        return self._process.exitcode

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def wait(self, timeout: float | None = None) -> int:
        """The exit code as of `poll`. Raises subprocess.TimeoutExpired."""
        self._process.join(timeout)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired([self._process.name], timeout or 0.0)
        return code

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """What is left of stdout, and stderr, once the process has ended."""
        self.wait(timeout)
        out = "" if self.stdout.closed else self.stdout.read()
        self.stdout.close()
        self._errors.seek(0)
        return out, self._errors.read()

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)
