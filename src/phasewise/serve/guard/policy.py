"""The server's rules for its users: `phasewise.serve.app.run(llm, policy=Policy(keys=...))`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
class Reread:
    """A file of options as it reads now: its recipes, and other options that have changed since the start."""

    recipes: Mapping[str, Mapping[str, str]]
    changed: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class BatchPolicy:
    """The rules of batches: where they are kept, and how much of them there may be."""

    folder: Path
    lines: int = 50_000  # of one batch
    file_bytes: int = 100 << 20  # of one file
    total_bytes: int = 10 << 30  # of all files
    live: int = 64  # batches of one key that are not over
    running: int = 8  # lines at a time


@dataclass(frozen=True, slots=True)
class ServePolicy:
    """The rules of a server: keys and limits, how answers are parsed, and which are kept."""

    queue: int = 256  # requests that may wait beside those that run; more get 429
    keys: Path | None = None  # the file of API keys; None: nobody is asked for one
    keep_alive: float = 75.0  # seconds that an idle connection stays open, longer than proxies and pools keep theirs
    origins: tuple[str, ...] = ()  # web origins whose pages may ask (CORS); "*": all
    write_timeout: float = 60.0  # seconds for which a client may take nothing of its answer
    open_metrics: bool = False  # /metrics needs no key
    tls: tuple[Path, Path] | None = None  # the files of certificate and private key: HTTPS
    log: str | None = None  # "text" or "json": a line per request on stderr; None: only what goes wrong
    refuse_late: bool = False  # requests that would miss their target for the first token are refused at once
    sleep_after: float | None = None  # seconds without requests after which weights leave memory; None: never
    otel: str | None = None  # the collector that traces go to (OTLP over HTTP); None: there are none
    caps: Caps = UNLIMITED  # of every request; a key may have narrower ones
    tool_format: str = "auto"  # how this model writes tool calls (tools/formats.py); auto: as its chat template does
    reasoning_format: str = "auto"  # what stands around its reasoning
    batches: BatchPolicy | None = None  # /v1/files and /v1/batches; None: there are none
    recipes: Callable[[], Reread] | None = None  # read again at SIGHUP; None: they stay as they are
    allow_templates: bool = False  # requests may bring a chat template of their own
    playground: bool = True  # there is a page at / to try the model with
    generation_config: str = "auto"  # sampling of requests that say nothing: the model's, none, or a file or folder
    lora_folder: Path | None = None  # adapters may be loaded from here at run time; None: not at all
    kv_events: str | None = None  # where KV events are published (ZeroMQ), such as tcp://127.0.0.1:5557; None: nowhere
    stored_bytes: int = 64 << 20  # of responses that later ones may refer to; the oldest make way
