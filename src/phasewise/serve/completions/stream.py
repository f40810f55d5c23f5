"""Bodies in, server-sent events out."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Protocol

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from phasewise.serve.completions.answer import Answer, AnswerDelta
from phasewise.serve.direct import Direct, direct
from phasewise.serve.failures import SHUTDOWN, ApiError, api_error
from phasewise.serve.guard.context import note

log = logging.getLogger(__name__)
BODY_BYTES = 8 << 20  # the largest body that is read
BODY_VALUES = 1 << 18  # commas in it: reading JSON of more values keeps everybody else waiting
DRAIN_BYTES = 64 << 20  # of a larger one, how much is thrown away so that its sender sees the answer
BODY_SECONDS = 60.0  # how long a client may take to send its body


# of a stream of events; the last keeps nginx from holding events back until its buffer is full
HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache", "X-Accel-Buffering": "no",
}  # fmt: skip


class Bodies:
    """Reads the bodies of requests, until it is closed."""

    def __init__(self) -> None:
        self._waits: set[asyncio.Timeout] = set()
        self._closed = False

    def close(self) -> None:
        """Wait no longer for bodies that are not complete."""
        self._closed = True
        for wait in self._waits:
            wait.reschedule(asyncio.get_running_loop().time())

    async def read(self, request: Request) -> bytes:
        """The whole body. Raises ApiError: 413 if it is too large, 408 if it does not come, 499 if its sender left."""
        parts, size = [], 0
        try:
            async with self._patience():
                async for part in request.stream():
                    size += len(part)
                    if size <= BODY_BYTES:
                        parts.append(part)
                    elif size > DRAIN_BYTES:
                        break
        except ClientDisconnect:
            raise ApiError(499, "the client left before its body was complete") from None
        except TimeoutError:
            if self._closed:
                raise ApiError(503, SHUTDOWN, code="unavailable") from None
            raise ApiError(408, f"the body did not arrive within {BODY_SECONDS:.0f} s") from None
        if size > BODY_BYTES:
            raise ApiError(413, f"the body is larger than {BODY_BYTES:,} bytes", code="body_too_large")
        body = b"".join(parts)
        if size > BODY_VALUES and body.count(b",") > BODY_VALUES:
            raise ApiError(413, f"the body has more than {BODY_VALUES:,} commas", code="body_too_large")
        return body

    @asynccontextmanager
    async def _patience(self) -> AsyncIterator[None]:
        async with asyncio.timeout(0 if self._closed else BODY_SECONDS) as wait:
            self._waits.add(wait)
            try:
                yield
            finally:
                self._waits.discard(wait)


class Writer(Protocol):
    """Writes one answer, whole or as events."""

    @property
    def id(self) -> str:
        """The id by which clients know the answer."""

    def body(self, answer: Answer, pieces: Sequence[AnswerDelta]) -> dict[str, Any]:
        """A whole answer."""

    def chunk(self, piece: AnswerDelta, answer: Answer) -> str:
        """Those of a piece; empty if the piece says nothing."""

    def last(self, answer: Answer) -> bytes:
        """The last event of the stream."""

    def failed(self, error: ApiError) -> bytes:
        """The last event of a stream that breaks."""


class EventStream(Response):
    """An answer as server-sent events: one write per engine step, however many choices it has.

    What arrives while the last write is done and the socket takes more is written at once, without waking this task.
    """

    def __init__(self, answer: Answer, wire: Writer) -> None:
        super().__init__(headers=HEADERS)
        del self.headers["content-length"]
        self._answer, self._wire = answer, wire
        self._broken: Exception | None = None  # what has come up outside of the task

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer, wire = self._answer, self._wire
        async with answer.attended(receive):
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            if (socket := direct(scope)) is not None:
                answer.bell.at_once = lambda: self._at_once(socket)
            try:
                while not answer.over:
                    await answer.bell.wait()
                    if self._broken is not None:
                        raise self._broken
                    if part := self._part():
                        await send({"type": "http.response.body", "body": part, "more_body": True})
                end = wire.last(answer)
            except Exception as error:  # the status is sent: the client can only be told in the stream
                if not isinstance(error, ApiError):
                    log.exception("a stream broke")
                note(known := api_error(error))
                end = wire.failed(known)
            await send({"type": "http.response.body", "body": end, "more_body": False})

    def _part(self) -> bytes:
        """The events of what has arrived."""
        return "".join([self._wire.chunk(piece, self._answer) for piece in self._answer.take()]).encode()

    def _at_once(self, socket: Direct) -> bool:
        """Write what has arrived; False if the task has to see to it, or to the end."""
        if not socket.ready or self._answer.gone:
            return False
        try:
            if part := self._part():
                socket.write(part)
        except Exception as error:  # for the task to tell
            self._broken = error
        return self._broken is None and not self._answer.over
