"""`phasewise batch`: a file of requests to a file of answers, without a server; and the options of batches of one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from phasewise.cli.options import DEFAULTS, EngineOptions, parse_bytes, spread
from phasewise.cli.progress import counting, say
from phasewise.errors import UserError
from phasewise.serve.guard.policy import BatchPolicy

LIMITS = BatchPolicy(Path())


@dataclass(frozen=True)
class BatchOptions:
    """Batches of a server: where they are kept, and how much of them there may be."""

    batches: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Keep files and batches here, and answer /v1/files and /v1/batches. Batches run while nobody else "
            "asks, and go on after a restart.",
        ),
    ] = None
    batch_lines: Annotated[int, typer.Option(min=1, help="Most lines of a batch.")] = LIMITS.lines
    batch_file_bytes: Annotated[str, typer.Option(metavar="SIZE", help="Most bytes of a file of requests.")] = (
        f"{LIMITS.file_bytes >> 20}M"
    )
    batch_total_bytes: Annotated[str, typer.Option(metavar="SIZE", help="Most bytes of all files of batches.")] = (
        f"{LIMITS.total_bytes >> 30}G"
    )
    batch_running: Annotated[int, typer.Option(min=1, help="Most lines of batches in one step.")] = LIMITS.running

    def policy(self) -> BatchPolicy | None:
        """The rules of batches; None where there are none. Raises UserError."""
        sizes = parse_bytes(self.batch_file_bytes), parse_bytes(self.batch_total_bytes)
        if self.batches is None:
            return None
        return BatchPolicy(self.batches, self.batch_lines, *sizes, running=self.batch_running)


@spread
def batch(
    file: Annotated[Path, typer.Argument(metavar="FILE.jsonl", help="The requests, one a line.", show_default=False)],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="OUT.jsonl", help="The file that answers are added to.")
    ],
    errors: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The file of requests that failed. Default: OUT.errors.jsonl."),
    ] = None,
    name: Annotated[
        str | None, typer.Option(metavar="NAME", help="Name by which requests call the model. Default: as in `serve`.")
    ] = None,
    engine: EngineOptions = DEFAULTS,
) -> None:
    """Answer a file of requests, as OpenAI's batches have them, and write the answers to another.

    Each line is {"custom_id": ..., "method": "POST", "url":
    "/v1/chat/completions", "body": {...}}; chat completions, completions,
    embeddings and responses are answered. What is in OUT.jsonl already, by
    custom_id, is not done again, so the same command goes on after it was
    interrupted. Requests that failed are tried again.

    [bold]Examples[/]

      phasewise batch requests.jsonl -o answers.jsonl --model smollm2
      phasewise batch requests.jsonl -o answers.jsonl --model path/to/model --max-running 128
    """
    engine.check()
    try:
        from phasewise.serve.batches.offline import BatchWork, run
    except ImportError as error:
        raise UserError(f"batches need the extra ({error}): pip install 'phasewise[serve]'") from error
    work = BatchWork.of(file, output)
    if not work.lines:
        say(f"nothing is left to do: all {work.done} lines are in {output}")
        return
    failures = errors or output.with_suffix(f".errors{output.suffix}")
    llm = engine.llm()
    try:
        with counting("batch", len(work.lines)) as count:
            failed = run(llm, name, work, failures, count)
    finally:
        llm.close()
    say(f"{len(work.lines) - failed} answered and {failed} failed; {work.done} were there before")
    if failed:
        raise UserError(f"{failed} of {len(work.lines)} requests failed: {failures} says why")
