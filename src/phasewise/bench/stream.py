"""An HTTP client for stopwatches: a request whose answer is told line by line, at the moment that it arrives.

Clients for applications take a hundred microseconds an event and more, which on a machine that also serves is time
taken from the server. Here httptools parses, and whoever listens is called from the socket's own callback.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Callable
from urllib.parse import urlsplit

import httptools

from phasewise.errors import UserError

SCHEMES = {"http": 80, "https": 443}


class Stream(asyncio.Protocol):
    """The answer to one request. `done` has an exception if the connection or the listener fails, or if the status is
    not 200."""

    def __init__(self, listen: Callable[[bytes], object]) -> None:
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._listen = listen
        self._parser = httptools.HttpResponseParser(self)
        self._rest = b""

    # ---- told by the event loop
    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._end(UserError(f"this is no HTTP: {error}"))

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(exc or UserError("the server closed the connection before its answer was complete"))

    # ---- told by the parser
    def on_body(self, body: bytes) -> None:
        if self._parser.get_status_code() != 200:
            self._rest += body
            return
        *lines, self._rest = (self._rest + body).split(b"\n")
        try:
            for line in lines:
                self._listen(line.rstrip(b"\r"))
        except Exception as error:  # the parser would hide it
            self._end(error)

    def on_message_complete(self) -> None:
        status = self._parser.get_status_code()
        self._end(None if status == 200 else UserError(f"HTTP {status}: {_message(self._rest)}"))

    def _end(self, error: Exception | None) -> None:
        if self.done.done():
            return
        if error is None:
            self.done.set_result(None)
        else:
            self.done.set_exception(error)


async def post(url: str, body: object, listen: Callable[[bytes], object]) -> None:
    """Send `body` as JSON, and tell `listen` each line of the answer. Raises UserError for an answer other than 200, or
    one that breaks off, OSError where there is no connection, and what `listen` raises."""
    content = json.dumps(body).encode()
    await _ask("POST", url, f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n", content, listen)


async def get(url: str, listen: Callable[[bytes], object]) -> None:
    """The same without a body."""
    await _ask("GET", url, "", b"", listen)


async def _ask(method: str, url: str, headers: str, content: bytes, listen: Callable[[bytes], object]) -> None:
    at, stream = urlsplit(url), Stream(listen)
    head = f"{method} {at.path} HTTP/1.1\r\nHost: {at.netloc}\r\n{headers}Connection: close\r\n\r\n"
    security = ssl.create_default_context() if at.scheme == "https" else None
    port = at.port or SCHEMES[at.scheme]
    transport, _ = await asyncio.get_running_loop().create_connection(
        lambda: stream, at.hostname or "", port, ssl=security
    )
    try:
        transport.write(head.encode() + content)
        await stream.done
    finally:
        transport.close()


def _message(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body[:200].decode(errors="replace")
