"""A request to an application of this process, past sockets and past the limits of keys."""

from __future__ import annotations

import asyncio
import json
import logging
import uuid
from typing import Any

from starlette.types import ASGIApp, Message

from phasewise.serve.batches.lines import BatchLine
from phasewise.serve.failures import api_error, error_body
from phasewise.serve.guard.gate import LINE
from phasewise.serve.guard.quota import Quota

log = logging.getLogger(__name__)
AGAIN = (429, 503)  # statuses after which the same may succeed


async def ask(app: ASGIApp, line: BatchLine, quota: Quota | None) -> tuple[int, dict[str, str], Any]:
    """Status, headers and JSON of the answer to a line, asked for the key of this quota. Cancelling it cancels the
    request."""
    status, headers, parts = 500, dict[str, str](), list[bytes]()
    body: list[Message] = [{"type": "http.request", "body": line.body, "more_body": False}]

    async def receive() -> Message:
        if body:
            return body.pop()
        await asyncio.Event().wait()  # nobody leaves
        raise AssertionError

    async def send(message: Message) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
            headers.update((name.decode().lower(), value.decode()) for name, value in message["headers"])
        else:
            parts.append(message.get("body", b""))

    given = [(b"content-type", b"application/json"), (b"content-length", str(len(line.body)).encode()),
             (b"x-request-id", f"batch-{uuid.uuid4().hex}".encode())]  # fmt: skip
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
        "path": line.url, "raw_path": line.url.encode(), "root_path": "", "query_string": b"", "headers": given,
        "client": ("batch", 0), "server": ("batch", 0), "extensions": {}, LINE: {"quota": quota},
    }  # fmt: skip
    try:
        await app(scope, receive, send)
    except Exception as error:  # an answer that broke off
        log.exception("a line of a batch failed")
        return 500, headers, error_body(api_error(error))
    return status, headers, json.loads(b"".join(parts))


async def ask_patiently(app: ASGIApp, line: BatchLine, quota: Quota | None) -> tuple[int, dict[str, str], Any]:
    """The same, asked again for as long as the server is too busy, or still loads the model."""
    while True:
        status, headers, found = await ask(app, line, quota)
        if status not in AGAIN or found["error"]["code"] == "model_load_failed":
            return status, headers, found
        await asyncio.sleep(float(headers.get("retry-after", 1)))
