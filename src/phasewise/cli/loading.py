"""The HTTP client of the benchmarks, and the vocabulary and context of the model behind a server."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from phasewise.cli.options import EngineOptions
from phasewise.errors import UserError

if TYPE_CHECKING:
    from phasewise.bench.load import LoadResult, Progress, RecordedLoad
    from phasewise.bench.workloads import Shot

FOREIGN = (1000, 4096)  # vocabulary and context assumed of a server whose checkpoint is not known


def client() -> Callable[[str, Sequence[Shot], Progress], LoadResult]:
    """The function that sends a load and measures it. Raises UserError if its libraries are not installed."""
    try:
        from phasewise.bench.load import measure
    except ImportError as error:
        raise UserError("the load client needs httptools and uvloop: pip install 'phasewise[bench]'") from error
    return measure


def recorder() -> Callable[[str, Sequence[Shot], Progress], RecordedLoad]:
    """The function that also records every event; call `client` first."""
    from phasewise.bench.load import record

    return record


def vocabulary(engine: EngineOptions, foreign: bool) -> tuple[int, int]:
    """The vocabulary size for prompts, and the context."""
    from phasewise.load import config_of

    if foreign:
        return FOREIGN
    config = config_of(engine.model)
    return config.vocab, config.max_positions


def prefix_hits(url: str) -> Callable[[], float | None]:
    """Tells, when it is called, the prompt tokens found since now in the caches of a server, or of those behind a
    router; None where nobody counts them."""
    from phasewise.bench.recording import counted

    before = counted(url).get("prefix_hits")

    def since() -> float | None:
        now = counted(url).get("prefix_hits")
        return None if now is None or before is None else now - before

    return since
