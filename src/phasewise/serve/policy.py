"""What a server asks of those who use it, as data: `phasewise.serve.app.run(llm, policy=Policy(keys=...))`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Policy:
    """Who may ask, and for how much."""

    queue: int = 256  # requests that may wait beside those that run; more get 429
    keys: Path | None = None  # the file of API keys; None: nobody is asked for one
    open_metrics: bool = False  # /metrics needs no key
