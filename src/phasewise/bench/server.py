"""A server of our own for a load test: started on a free port, stopped at the end."""

from __future__ import annotations

import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import IO

from phasewise.errors import UserError

START_SECONDS, STOP_SECONDS = 300.0, 15.0


@contextmanager
def serving(arguments: Sequence[str]) -> Iterator[str]:
    """The URL of a `phasewise serve` with these arguments. Raises UserError with its last words if it fails."""
    port = free_port()
    command = [sys.executable, "-m", "phasewise", "serve", "--port", str(port), *arguments]
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryFile() as errors:  # a file, not a pipe: nobody reads while the load runs
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=errors)
        try:
            wait_ready(process, url, errors)
            yield url
        finally:
            process.terminate()
            try:
                process.wait(timeout=STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


class Handoffs:
    """Moves of KV between the workers of a server, as its /metrics count them."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._before = self._read()

    def row(self) -> dict[str, float | int | None]:
        """The number since the last call, and their mean in seconds (None of none)."""
        (n, seconds), (n_before, seconds_before) = now, _ = self._read(), self._before
        self._before = now
        moves = n - n_before
        return {"handoffs": moves, "handoff_mean_s": (seconds - seconds_before) / moves if moves else None}

    def _read(self) -> tuple[int, float]:
        with urllib.request.urlopen(f"{self._url}/metrics", timeout=5) as answer:
            words = dict(line.rsplit(" ", 1) for line in answer.read().decode().splitlines() if line[:1] != "#")
        return int(float(words["phasewise_handoff_seconds_count"])), float(words["phasewise_handoff_seconds_sum"])


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_ready(process: subprocess.Popen[bytes], url: str, errors: IO[bytes]) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            errors.seek(0)
            lines = [line for line in errors.read().decode(errors="replace").splitlines() if line.strip()]
            reason = lines[-1].removeprefix("error: ") if lines else f"exit status {process.returncode}"
            raise UserError(f"the server did not start: {reason}")
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    raise UserError(f"the server was not ready after {START_SECONDS:.0f} s")
