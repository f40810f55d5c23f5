"""Log lines on stderr: every request, and what goes wrong, as JSON or as text. Clients choose
some of the words (paths, ids, names in errors), so none of them can end a line or begin one; prompts are in none."""

from __future__ import annotations

import json
import logging
import re
import time
import uuid
from collections.abc import Iterable
from typing import Any

from phasewise.serve.guard.context import RequestContext

LOGGERS = ("phasewise", "uvicorn")
LONGEST = 200  # characters of a path
requests = logging.getLogger("phasewise.requests")
_SANE = re.compile(rb"[A-Za-z0-9._:-]{1,64}")
_PLAIN = re.compile(r"[\w.:/@+-]+", re.ASCII)


class JsonLines(logging.Formatter):
    """{"time", "level", "logger", "message", ...}; a traceback is one string."""

    def format(self, record: logging.LogRecord) -> str:
        line = {"time": _moment(record), "level": record.levelname.lower(), "logger": record.name,
                "message": record.getMessage(), **getattr(record, "fields", {})}  # fmt: skip
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


class TextLines(logging.Formatter):
    """TIME LEVEL MESSAGE name=value ...; the lines of a traceback are indented."""

    def format(self, record: logging.LogRecord) -> str:
        fields = getattr(record, "fields", {})
        said = [f"{name}={_plain(value)}" for name, value in fields.items() if value is not None]
        message = json.dumps(record.getMessage(), ensure_ascii=True)[1:-1].replace('\\"', '"')
        line = " ".join([_moment(record), record.levelname.lower(), message, *said])
        if record.exc_info:
            line += "".join(f"\n    {each}" for each in self.formatException(record.exc_info).splitlines())
        return line


def configure(format: str) -> None:
    """Write what is logged, requests included, in this format."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines() if format == "json" else TextLines())
    for name in LOGGERS:
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
    logging.getLogger("phasewise").setLevel(logging.INFO)


def request_id(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """The id that the client gave its request (x-request-id), if it is one and a sane one; else a new one."""
    given = [value for name, value in headers if name == b"x-request-id"]
    return given[0].decode() if len(given) == 1 and _SANE.fullmatch(given[0]) else uuid.uuid4().hex


def request_line(exchange: RequestContext) -> None:
    """Log a request that has ended. Seconds begin when its headers were read."""
    if not requests.isEnabledFor(logging.INFO):
        return
    fields: dict[str, Any] = {
        "id": exchange.id, "key": None if exchange.quota is None else exchange.quota.key.name,
        "method": exchange.method, "path": exchange.path[:LONGEST], "status": exchange.status,
        "error": exchange.error, "model": exchange.model, "prompt_tokens": exchange.prompt_tokens,
        "output_tokens": exchange.output_tokens, "ended": dict(exchange.ways) or None,
        "ttft": None if exchange.ttft is None else round(exchange.ttft, 6),
        "seconds": round(time.monotonic() - exchange.began, 6),
    }  # fmt: skip
    requests.info("request", extra={"fields": fields})


def _moment(record: logging.LogRecord) -> str:
    seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    return f"{seconds}.{int(record.msecs):03d}Z"


def _plain(value: Any) -> str:
    text = str(value)
    return text if _PLAIN.fullmatch(text) else json.dumps(value if isinstance(value, dict) else text)
