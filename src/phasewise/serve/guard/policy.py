"""What a server asks of its users, and how it treats them: `phasewise.serve.app.run(llm, policy=Policy(keys=...))`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

LOG_FORMATS = ("text", "json")


@dataclass(frozen=True, slots=True)
class Caps:
    """The most that one request may ask for; None: as much as the model and the KV budget have."""

    max_prompt: int | None = None  # tokens of a prompt
    max_n: int | None = None  # answers: its prompts times n
    max_tokens: int | None = None  # of one answer
    timeout: float | None = None  # seconds until all of it must be there


UNLIMITED = Caps()


@dataclass(frozen=True, slots=True)
class Policy:
    """Who may ask, and for how much; how answers are read, and which are kept."""

    queue: int = 256  # requests that may wait beside those that run; more get 429
    keys: Path | None = None  # the file of API keys; None: nobody is asked for one
    open_metrics: bool = False  # /metrics needs no key
    tls: tuple[Path, Path] | None = None  # the files of certificate and private key: HTTPS
    log: str | None = None  # "text" or "json": a line per request on stderr; None: only what goes wrong
    caps: Caps = UNLIMITED  # of every request; a key may have narrower ones
    tool_format: str = "auto"  # how this model writes tool calls (tools/formats.py); auto: as its chat template does
    reasoning_format: str = "auto"  # what stands around its reasoning
    allow_templates: bool = False  # requests may bring a chat template of their own
    stored_bytes: int = 64 << 20  # of responses that later ones may refer to; the oldest make way
