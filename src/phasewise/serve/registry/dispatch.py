"""From a request to the model that it names: waits for its load, telling how far it is, and hands the request on."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import MutableMapping
from typing import Any

from fastapi import Request
from pydantic import BaseModel, ConfigDict
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from phasewise.serve.completions.schema import read
from phasewise.serve.completions.stream import HEADERS, Bodies
from phasewise.serve.completions.wire import DONE
from phasewise.serve.failures import SHUTDOWN, ApiError, api_error
from phasewise.serve.guard.context import CURRENT, note
from phasewise.serve.registry.registry import ModelRegistry
from phasewise.serve.registry.slot import ModelSlot
from phasewise.serve.stream_error import error_body, error_event

log = logging.getLogger(__name__)
GRACE = 1.0  # seconds that a stream waits for a load before it begins, so that quick failures keep their status
BEAT = 1.0  # seconds between two comments in a stream that waits
SOON = 60.0  # seconds: the longest Retry-After of a load under way


class _Head(BaseModel):
    """The part of a body that says where the request goes; the model's own endpoint reads the rest."""

    model_config = ConfigDict(strict=True, extra="ignore", protected_namespaces=())

    model: str | None = None
    stream: bool | None = None


class Dispatcher:
    """The endpoints of all models. `wait`: seconds for which a request that is no stream waits for a load."""

    def __init__(self, registry: ModelRegistry, wait: float) -> None:
        self._registry, self._wait, self._bodies = registry, wait, Bodies()

    def close(self) -> None:
        """Wait no longer for bodies that are not complete."""
        self._bodies.close()

    async def post(self, request: Request) -> Response:
        """Whatever the model's own endpoint of this path answers."""
        body = await self._bodies.read(request)
        head = await asyncio.to_thread(read, _Head, body) if len(body) > 1 << 16 else read(_Head, body)
        return self._to(head.model, body, head.stream is True)

    async def get(self, request: Request) -> Response:
        """The same of a path without a body, for the model that `?model=` names."""
        return self._to(request.query_params.get("model"), b"", False)

    async def events(self, request: Request) -> Response:
        """The events of a model that is loaded: of the one that `?model=` names, or that was asked for last. Listening
        neither loads a model nor keeps it loaded."""
        named = request.query_params.get("model")
        slots = self._registry.slots.values() if named is None else [self._registry.slot(named)]
        loaded = [slot for slot in slots if slot.state == "ready" and slot.service is not None]
        if not loaded:
            reason = "no model is loaded" if named is None else f"the model {named!r} is not loaded"
            raise ApiError(503, f"{reason}: ask it something first", "model", "model_not_loaded")
        slot = max(loaded, key=lambda each: each.used)
        assert slot.service is not None and slot.service.events is not None
        return await slot.service.events.stream(request)

    def _to(self, model: str | None, body: bytes, stream: bool) -> Response:
        slot = self._registry.slot(model)
        if (exchange := CURRENT.get()) is not None:
            exchange.permit(model or slot.entry.name)  # whoever may not use a model does not have it loaded
        return _HandedOn(self._registry, slot, body, stream, self._wait)


class _HandedOn(Response):
    """The answer of the model's own application to a request whose body has been read."""

    def __init__(self, registry: ModelRegistry, slot: ModelSlot, body: bytes, stream: bool, wait: float) -> None:
        super().__init__()
        self._registry, self._slot, self._body, self._stream, self._wait = registry, slot, body, stream, wait

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gone: asyncio.Task[Message] = asyncio.create_task(_disconnect(receive))
        begun = _Begun(scope["path"], send)
        try:
            async with self._registry.using(self._slot):
                try:
                    if not await self._ready(gone, begun):
                        return
                except ApiError as error:
                    if not begun.started:
                        raise
                    await begun.fail(error)
                    return
                assert self._slot.app is not None
                sending = begun.forward if begun.started else send
                await self._slot.app(scope, _replayed(self._body, gone), sending)
        finally:
            gone.cancel()

    async def _ready(self, gone: asyncio.Task[Message], begun: _Begun) -> bool:
        """Wait until the model can be asked; False if the client has left. Raises ApiError 503."""
        slot, registry = self._slot, self._registry
        if slot.state == "ready" and not slot.broken:
            return True
        registry.refuse_failed(slot)
        loading, end = registry.begin(slot), time.monotonic() + self._wait
        while not loading.done():
            if registry.stopping:
                raise ApiError(503, SHUTDOWN, code="unavailable")
            pause = (BEAT if begun.started else GRACE) if self._stream else min(BEAT, end - time.monotonic())
            if pause <= 0:
                raise _still_loading(slot)
            await asyncio.wait({loading, gone}, timeout=pause, return_when=asyncio.FIRST_COMPLETED)
            if gone.done():
                return False
            if self._stream and not loading.done():
                await begun.tell(f"loading {slot.entry.name}: {slot.progress}")
        registry.refuse_failed(slot)
        if slot.state != "ready":
            raise ApiError(503, SHUTDOWN, code="unavailable")
        return True


def _still_loading(slot: ModelSlot) -> ApiError:
    """The error that names a load under way, how far it is, and when to ask again."""
    spent = time.monotonic() - slot.began
    rest = spent * (1 / slot.fraction - 1) if slot.fraction else SOON
    return ApiError(
        503, f"the model {slot.entry.name!r} is still loading ({slot.progress}): ask again later", "model",
        "model_loading", retry=min(SOON, rest), headers={"X-Model-Loaded": f"{slot.fraction:.2f}"},
    )  # fmt: skip


async def _disconnect(receive: Receive) -> Message:
    """Return once the client is gone; its body has been read."""
    while (message := await receive())["type"] != "http.disconnect":
        pass
    return message


def _replayed(body: bytes, gone: asyncio.Task[Message]) -> Receive:
    """A body that has been read, once more, and then the client's leaving."""
    parts: list[MutableMapping[str, Any]] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        return parts.pop() if parts else await asyncio.shield(gone)

    return receive


class _Begun:
    """A stream that may have begun before its model was there. What goes wrong then is told in the stream."""

    def __init__(self, path: str, send: Send) -> None:
        self._path, self._send = path, send
        self.started = False
        self._status = 200
        self._error = b""

    async def tell(self, comment: str) -> None:
        """A comment, which clients leave out; the first one begins the stream."""
        if not self.started:
            self.started = True
            headers = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        await self._send({"type": "http.response.body", "body": f": {comment}\n\n".encode(), "more_body": True})

    async def forward(self, message: Message) -> None:
        """What the model's application sends: events as they are, and an error in place of events as one."""
        if message["type"] == "http.response.start":
            self._status = message["status"]
        elif self._status < 400:
            await self._send(message)
        else:
            self._error += message.get("body", b"")
            if not message.get("more_body"):
                await self._end(json.loads(self._error))

    async def fail(self, error: ApiError) -> None:
        """End with an error."""
        note(known := api_error(error))
        await self._end(error_body(self._path, known))

    async def _end(self, body: dict[str, Any]) -> None:
        """The error as the endpoint's clients expect it in a stream."""
        text = error_event(self._path, body)
        end = DONE if text.startswith(b"data:") else b""  # events that have names end without
        await self._send({"type": "http.response.body", "body": text + end, "more_body": False})
