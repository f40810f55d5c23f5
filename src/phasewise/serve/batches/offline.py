"""A batch without a server: the same endpoints in this process, as many lines at a time as the engine runs."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from phasewise.errors import UserError
from phasewise.llm import LLM
from phasewise.serve.app import create_app
from phasewise.serve.batches.call import ask_patiently
from phasewise.serve.batches.lines import BatchLine, answered, checked, numbered, parse
from phasewise.serve.guard.policy import ServePolicy


@dataclass(frozen=True)
class BatchWork:
    """The lines that are to be answered, the file for their answers, and how many are in it already."""

    lines: list[BatchLine]
    output: Path
    done: int

    @classmethod
    def of(cls, file: Path, output: Path) -> BatchWork:
        """What a file asks for and another does not have yet. Raises UserError naming the line that is wrong."""
        total, wrong = checked(_lines(file), None, 1 << 40)
        if wrong:
            raise UserError(f"{file}: {wrong[0]}")
        done = _done(output)
        every = (parse(number, text, None) for number, text in numbered(_lines(file)))
        lines = [line for line in every if line.custom_id not in done]
        return cls(lines, output, total - len(lines))


def run(llm: LLM, name: str | None, work: BatchWork, failures: Path, told: Callable[[int], Any]) -> int:
    """Answer all lines, in whatever order they end, and return how many failed. `told` hears how many have ended."""
    try:
        with work.output.open("ab") as out, failures.open("wb") as wrong:
            failed = asyncio.run(_run(llm, name, work.lines, (out, wrong), told))
    except OSError as error:
        raise UserError(f"{error.filename or work.output} cannot be written: {error.strerror or error}") from error
    if not failed:
        failures.unlink()
    return failed


async def _run(
    llm: LLM, name: str | None, lines: list[BatchLine], files: tuple[IO[bytes], IO[bytes]], told: Callable[[int], Any]
) -> int:
    app = create_app(llm, name=name, policy=ServePolicy(playground=False))
    left, ended, failed = iter(lines), 0, 0

    async def worker() -> None:
        nonlocal ended, failed
        for line in left:
            status, headers, body = await ask_patiently(app, line, None)
            row = answered(line, status, headers.get("x-request-id", ""), body)
            out = files[0 if status == 200 else 1]
            out.write(json.dumps(row).encode() + b"\n")
            out.flush()
            ended, failed = ended + 1, failed + (status != 200)
            told(ended)

    async with app.router.lifespan_context(app):
        async with asyncio.TaskGroup() as group:
            for _ in range(min(llm.limits.max_running, len(lines))):
                group.create_task(worker())
        for out in files:
            os.fsync(out.fileno())
    return failed


def _lines(file: Path) -> Iterator[bytes]:
    """Raises UserError."""
    try:
        with file.open("rb") as opened:
            yield from opened
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror or error}") from error


def _done(output: Path) -> set[str]:
    """The custom ids in a file of answers. Half a line at its end, which a death may leave, is cut off. Raises
    UserError for a file of something else."""
    if not output.exists():
        return set()
    found, end = set[str](), 0
    for number, text in enumerate(_lines(output), 1):
        if not text.endswith(b"\n"):
            os.truncate(output, end)
            break
        end += len(text)
        try:
            found.add(json.loads(text)["custom_id"])
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{output}: line {number} is no answer of a batch: name another file with -o") from error
    return found
