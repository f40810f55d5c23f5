"""The gate that every HTTP request passes: whose key it has, and what of it may go on. ASGI, around all endpoints."""

from __future__ import annotations

import logging

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from phasewise.serve.failures import ApiError
from phasewise.serve.front import ServedFront
from phasewise.serve.guard.context import CURRENT, RequestContext
from phasewise.serve.guard.keys import KeyRing
from phasewise.serve.guard.policy import ServePolicy
from phasewise.serve.playground.files import pages
from phasewise.serve.watch.events import ENDLESS
from phasewise.serve.watch.logs import request_id, request_line
from phasewise.serve.watch.traces import PARENT, Tracer

log = logging.getLogger(__name__)
OPEN = ("/health", "/health/live", "/health/ready")  # whoever watches a server has no key
METRICS = "/metrics"
LINE = "phasewise.line"  # in a scope that the server itself makes, for a line of a batch: {"quota": its key's or None}


class Gate:
    """Lets requests through that carry a key of the ring, as long as that key's limits hold; without a ring, all."""

    def __init__(
        self, app: ASGIApp, service: ServedFront, keys: KeyRing | None, policy: ServePolicy, tracer: Tracer | None
    ) -> None:
        self._app, self._service, self._keys, self._policy = app, service, keys, policy
        self._tracer = tracer
        self._open = {
            *OPEN,
            *(pages() if policy.playground else ()),
        }  # the page has no secrets: its requests need a key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if scope["method"] == "HEAD" and scope["path"] != ENDLESS:  # answered as GET is; uvicorn leaves the body out
            scope = {**scope, "method": "GET"}
        exchange = RequestContext(
            self._end, request_id(scope["headers"]), scope["method"], scope["path"], self._policy.caps
        )
        line = scope.get(LINE)
        if line is not None:
            exchange.background, exchange.quota = True, line["quota"]
        if self._tracer is not None:
            exchange.feeds, exchange.parent = [], [pair for pair in scope["headers"] if pair[0] in PARENT]
        entered = CURRENT.set(exchange)

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                exchange.status = message["status"]
                headers = [(b"x-request-id", exchange.id.encode())]
                if exchange.numbers:
                    headers.append((b"x-request-numbers", ",".join(map(str, exchange.numbers)).encode()))
                headers += [] if exchange.quota is None else exchange.quota.headers()
                message["headers"] = [*message.get("headers", ()), *headers]
            await send(message)

        asks = scope["method"] == "POST"  # whoever only looks neither wakes the model nor keeps it awake
        if asks:
            self._service.sleeper.enter()
        try:
            if line is None:
                self._admit(exchange, scope)
            if asks:
                await self._service.sleeper.awake()
            await self._app(scope, receive, sending)
        except Exception as error:
            if not isinstance(error, ApiError):  # those of the gate itself; endpoints answer theirs
                log.exception("request %s failed", exchange.id)
            if exchange.status is not None:  # nothing can be said any more: the connection is closed
                raise
            response = await self._service.refuse(Request(scope), error)
            if _ambiguous(scope):
                response.headers["Connection"] = "close"  # whatever comes after it may be part of it
            await response(scope, receive, sending)
        finally:
            if asks:
                self._service.sleeper.leave()
            CURRENT.reset(entered)
            exchange.close()

    def _admit(self, exchange: RequestContext, scope: Scope) -> None:
        """Raises ApiError 400, 401, 403 or 429 for a request that may not pass."""
        if _ambiguous(scope):
            raise ApiError(400, "content-length and transfer-encoding came together: send one", code="ambiguous_length")
        path = scope["path"]
        if self._keys is None or path in self._open or (path == METRICS and self._policy.open_metrics):
            return
        quota = self._keys.find(scope["headers"])
        if path == METRICS and not quota.key.metrics:
            raise ApiError(403, f"the key {quota.key.name!r} may not read {METRICS}", code="metrics_not_allowed")
        exchange.quota = quota
        if scope["method"] == "POST":  # what costs nothing is not counted
            quota.enter()
            exchange.counted = True

    def _end(self, exchange: RequestContext) -> None:
        """All of a request is over: its key gets back what it did not use, and it is logged and traced."""
        if exchange.counted and exchange.quota is not None:
            exchange.quota.leave(exchange.reserved, exchange.prompt_tokens, exchange.output_tokens)
        elif exchange.background and exchange.quota is not None:
            exchange.quota.note(exchange.prompt_tokens, exchange.output_tokens)
        request_line(exchange)
        if self._tracer is not None:
            self._tracer.ended(exchange)


def _ambiguous(scope: Scope) -> bool:
    """True if a proxy in front may see the end of the body elsewhere (h11 refuses all other cases)."""
    return {b"content-length", b"transfer-encoding"} <= {name for name, _ in scope["headers"]}
