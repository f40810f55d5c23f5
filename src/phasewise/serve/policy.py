"""How a server treats those who use it, as data: `phasewise.serve.app.run(llm, policy=Policy(queue=16))`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Policy:
    """How much may wait and be kept, and how answers are read."""

    queue: int = 256  # requests that may wait beside those that run; more get 429
    tool_format: str = "auto"  # how this model writes tool calls (tools/formats.py); auto: as its chat template does
    reasoning_format: str = "auto"  # what stands around its reasoning
    stored_bytes: int = 64 << 20  # of responses that later ones may refer to; the oldest make way
