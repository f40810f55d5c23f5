"""What the benchmarks that load a server share: the client, and what is known of the model behind it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from phasewise.cli.options import EngineOptions
from phasewise.errors import UserError

if TYPE_CHECKING:
    from phasewise.bench.load import Progress, Recorded, Result
    from phasewise.bench.workloads import Shot

FOREIGN = (1000, 4096)  # vocabulary and context assumed of a server whose checkpoint is not known


def client() -> Callable[[str, Sequence[Shot], Progress], Result]:
    """Raises UserError where it is not installed."""
    try:
        from phasewise.bench.load import measure
    except ImportError as error:
        raise UserError("the load client needs httptools and uvloop: pip install 'phasewise[bench]'") from error
    return measure


def recorder() -> Callable[[str, Sequence[Shot], Progress], Recorded]:
    """The client that keeps everything on record; `client` comes first."""
    from phasewise.bench.load import record

    return record


def vocabulary(engine: EngineOptions, foreign: bool) -> tuple[int, int]:
    """Token ids that prompts may have, and the context."""
    from phasewise.load import config_of

    if foreign:
        return FOREIGN
    config = config_of(engine.model)
    return config.vocab, config.max_positions
