"""The router's ASGI application: a request goes to the best server, and its answer comes back as it is.

Until the first byte of an answer has been sent, another server may be asked instead. From then on the client is told
that the answer has broken off: by an error as the last event of a stream, else by the connection that ends too early.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
from starlette.types import Receive, Scope, Send

from phasewise.serve.failures import ApiError, error_response, json_response
from phasewise.serve.route.pool import KEPT, ServerPool, parsed
from phasewise.serve.route.upstream import Upstream, Visit
from phasewise.serve.stream_error import ANTHROPIC, error_body, error_event

log = logging.getLogger(__name__)
LARGEST = 64 << 20  # bytes of a body
PER_HOP = {b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"te", b"trailer",
           b"transfer-encoding", b"upgrade", b"host", b"content-length", b"expect"}  # fmt: skip
AWAY = {502, 503, 504}  # statuses of a server that takes nothing now: another one may
FULL = 429
ENDS = (b"\n\n", b"\r\n\r\n", b"\r\r")  # of an event
NUMBER = re.compile(rb'"sequence_number"\s*:\s*(\d{1,15})\b')  # of an event of /v1/responses
Headers = list[tuple[bytes, bytes]]


class Gone(Exception):
    """The client has left."""


@dataclass
class Exchange:
    """One request of a client, and how far its answer is."""

    method: str
    path: str  # with its query
    headers: Headers
    body: bytes
    send: Send
    begun: bool = field(default=False)
    events: bool = field(default=False)  # the answer is a stream of events, of which whole ones are passed on
    number: int = field(default=-1)  # of the last event that has one
    rest: bytes = field(default=b"")  # what was heard of an event that is not whole

    @property
    def plain(self) -> str:
        return self.path.partition("?")[0]

    async def begin(self, status: int, headers: Headers, events: bool) -> None:
        self.begun, self.events = True, events
        await self.send({"type": "http.response.start", "status": status, "headers": headers})

    async def pass_on(self, part: bytes) -> None:
        """Send a part of the answer; of events those that are whole, as an error may have to follow."""
        if self.events:
            part = self.rest + part
            whole = max(part.rfind(end) + len(end) if end in part else 0 for end in ENDS)
            part, self.rest = part[:whole], part[whole:]
            self.number = int([self.number, *NUMBER.findall(part)][-1])
        if part:
            await self.send({"type": "http.response.body", "body": part, "more_body": True})

    async def end(self) -> None:
        await self.send({"type": "http.response.body", "body": self.rest, "more_body": False})

    async def break_off(self, error: ApiError) -> None:
        """End with an error. Raises it where the answer is no stream: its connection ends before the answer does."""
        if not self.events:
            raise error
        event = error_event(self.plain, error_body(self.plain, error), self.number + 1)
        await self.send({"type": "http.response.body", "body": event, "more_body": False})


class RouteFront:
    """`pool`: the servers. /health and /metrics are the router's own; everything else is some server's.
    `interval`: seconds between two looks at them; `beside`: what runs as long as it does."""

    def __init__(
        self, pool: ServerPool, interval: float, beside: Sequence[Callable[[], Coroutine[Any, Any, None]]] = ()
    ) -> None:
        self.pool, self._interval, self._beside = pool, interval, beside

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        elif scope["type"] == "http":
            await self._http(scope, receive, send)

    async def _live(self, receive: Receive, send: Send) -> None:
        await receive()
        tasks = [asyncio.create_task(each()) for each in self._beside]
        async with self.pool.watched(self._interval):
            await send({"type": "lifespan.startup.complete"})
            await receive()
        for task in tasks:
            task.cancel()
        await send({"type": "lifespan.shutdown.complete"})

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["raw_path"].decode("ascii", "replace").partition("?")[0]
        query = scope["query_string"].decode("ascii", "replace")
        headers = [(name, value) for name, value in scope["headers"] if name.lower() not in PER_HOP]
        exchange = Exchange(scope["method"], f"{path}?{query}" if query else path, headers, b"", send)
        try:
            if path in ("/health", "/metrics") and scope["method"] == "GET":
                await self._own(path, headers, scope, receive, send)
                return
            exchange.body = await _body(receive)
            await self._answered(exchange, receive)
        except Gone:
            return
        except ApiError as error:
            if exchange.begun:
                raise
            response = (json_response(error_body(path, error), error.status) if path.startswith(ANTHROPIC)
                        else error_response(error))  # fmt: skip
            await response(scope, receive, send)

    async def _own(self, path: str, headers: Headers, scope: Scope, receive: Receive, send: Send) -> None:
        if path == "/metrics":
            from starlette.responses import PlainTextResponse

            await PlainTextResponse(await self.pool.metrics(_key(headers)))(scope, receive, send)
            return
        up = [each.up for each in self.pool.upstreams]
        body = {
            "status": "ok" if any(up) else "failed",
            "servers": [{"server": i, "up": each} for i, each in enumerate(up)],
        }
        await json_response(body, 200 if any(up) else 503)(scope, receive, send)

    async def _answered(self, exchange: Exchange, receive: Receive) -> None:
        """Forward a request. If its client leaves, so does the request."""
        forwarding = asyncio.create_task(self._forward(exchange))
        leaving = asyncio.create_task(_left(receive))
        try:
            await asyncio.wait({forwarding, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not forwarding.done():
                forwarding.cancel()
                await asyncio.gather(forwarding, return_exceptions=True)
                raise Gone
            forwarding.result()
        finally:
            leaving.cancel()

    async def _forward(self, exchange: Exchange) -> None:
        """Ask one server after the other until one answers. Raises ApiError."""
        ask = parsed(exchange.body) if exchange.method == "POST" else {}
        owner = self.pool.owner(exchange.plain, ask)
        prompt: Sequence[int] = ()
        if ask:
            prompt = await self.pool.prompt(exchange.plain, ask, _key(exchange.headers))
        tried = self.pool.ranked(prompt, owner)
        for upstream in tried:
            if await self._asked(exchange, upstream, prompt, last=upstream is tried[-1]):
                return
        raise ApiError(503, "none of the servers behind this router answers: try again later", code="unavailable")

    async def _asked(self, exchange: Exchange, upstream: Upstream, prompt: Sequence[int], last: bool) -> bool:
        """Returns whether this server has answered. What it says is passed on, unless it can take nothing now and
        another one is left to ask."""
        visit = Visit(upstream, prompt)
        try:
            request = self.pool.http.build_request(
                exchange.method, upstream.url + exchange.path, headers=exchange.headers, content=exchange.body
            )
            answer = await self.pool.http.send(request, stream=True)
            try:
                if not last and answer.status_code in (*AWAY, FULL):
                    if answer.status_code != FULL:
                        upstream.lost()
                    return False
                upstream.up = answer.status_code not in AWAY
                visit.answered(answer.status_code < 300)
                await self._passed(exchange, upstream, answer)
            finally:
                await answer.aclose()
        except httpx.HTTPError as error:
            upstream.lost()
            log.warning("server %d: %s: %s", upstream.number, type(error).__name__, error)
            if not exchange.begun:
                return False
            await exchange.break_off(ApiError(502, "the server broke its answer off: ask again", code="broken_off"))
        finally:
            visit.over()
        return True

    async def _passed(self, exchange: Exchange, upstream: Upstream, answer: httpx.Response) -> None:
        """Pass an answer on, byte for byte. Its head waits for the first bytes of its body: without these, another
        server may still be asked."""
        parts = aiter(answer.stream)  # type: ignore[arg-type]  # of an asynchronous client
        first = await anext(parts, b"")
        head = [
            (name.lower(), value)
            for name, value in answer.headers.raw
            if name.lower() not in PER_HOP - {b"content-length"}
        ]
        head.append((b"x-served-by", str(upstream.number).encode()))
        if answer.status_code < 300 and (exchange.method == "POST" or exchange.plain.startswith(KEPT)):
            self.pool.note(upstream, first[:4096])
        await exchange.begin(answer.status_code, head, _is_event_stream(answer))
        await exchange.pass_on(first)
        async for part in parts:
            await exchange.pass_on(part)
        await exchange.end()


def _is_event_stream(answer: httpx.Response) -> bool:
    """True if the bytes of an answer are events that can be read as they pass."""
    kind = answer.headers.get("content-type", "").partition(";")[0].strip().lower()
    plain = answer.headers.get("content-encoding", "identity") == "identity"
    return kind == "text/event-stream" and plain and "content-length" not in answer.headers


async def _body(receive: Receive) -> bytes:
    """The whole body of a request. Raises ApiError for one that is too large, Gone where the client leaves."""
    parts, size = [], 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Gone
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > LARGEST:
            raise ApiError(413, f"the body has more than {LARGEST:,} bytes", code="body_too_large")
        if not message.get("more_body", False):
            return b"".join(parts)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _key(headers: Headers) -> Headers:
    """The headers by which a server knows its client."""
    return [(name, value) for name, value in headers if name.lower() in (b"authorization", b"x-api-key")]
