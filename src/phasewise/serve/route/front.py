"""The router's ASGI application: a request goes to the best server, and its answer comes back as it is.

Until the first byte of an answer has been sent, another server may be asked instead; from then on the client is told
that the answer has broken off, as by a server itself.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
from starlette.types import Message, Receive, Scope, Send

from phasewise.serve.failures import ApiError, error_response, json_response
from phasewise.serve.messages.ask import error_body as anthropic_body
from phasewise.serve.route.pool import ServerPool, parsed
from phasewise.serve.route.upstream import Upstream, Visit

log = logging.getLogger(__name__)
LARGEST = 64 << 20  # bytes of a body
PER_HOP = {b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"te", b"trailer",
           b"transfer-encoding", b"upgrade", b"host", b"content-length", b"expect"}  # fmt: skip
AWAY = {502, 503, 504}  # statuses of a server that takes nothing now: another one may
FULL = 429
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

    @property
    def plain(self) -> str:
        return self.path.partition("?")[0]

    async def tell(self, message: Message) -> None:
        self.begun = True
        await self.send(message)


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
            response = (json_response(anthropic_body(error), error.status) if path.startswith("/v1/messages")
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
            if exchange.begun:
                raise ApiError(502, "the server broke its answer off") from error
            return False
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
        if exchange.method == "POST" and answer.status_code < 300:
            self.pool.note(upstream, first[:4096])
        await exchange.tell({"type": "http.response.start", "status": answer.status_code, "headers": head})
        await exchange.tell({"type": "http.response.body", "body": first, "more_body": True})
        async for part in parts:
            await exchange.tell({"type": "http.response.body", "body": part, "more_body": True})
        await exchange.tell({"type": "http.response.body", "body": b"", "more_body": False})


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
