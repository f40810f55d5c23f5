"""/v1/responses: stateless, or going on from a response that is kept."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any

from fastapi import Request
from fastapi.responses import Response
from pydantic import BaseModel

from phasewise.serve.failures import ApiError, json_response
from phasewise.serve.responses.ask import Item, ResponsesAsk
from phasewise.serve.responses.writer import ResponseWriter

if TYPE_CHECKING:
    from phasewise.serve.service import Service


class Stored:
    """Responses by id, each with all items up to its end. Together at most `limit` bytes of JSON: those not asked for
    the longest make way."""

    def __init__(self, limit: int) -> None:
        self.limit, self.bytes = limit, 0
        self._kept: OrderedDict[str, bytes] = OrderedDict()

    def put(self, id: str, items: list[Item], body: Mapping[str, Any]) -> bool:
        """Keeps a response, and returns True if it was kept; one larger than the limit is not."""
        text = json.dumps({"items": items, "body": body}).encode()
        if len(text) > self.limit:
            return False
        self._kept[id] = text
        self.bytes += len(text)
        while self.bytes > self.limit:
            self.bytes -= len(self._kept.popitem(last=False)[1])
        return True

    def get(self, id: str, param: str | None = None) -> tuple[list[Item], dict[str, Any]]:
        """All items up to its end, and the response. Raises ApiError 404."""
        text = self._kept.get(id)
        if text is None:
            raise ApiError(404, f"there is no response {id!r}; it was not stored, or made way for newer ones", param,
                           "response_not_found")  # fmt: skip
        self._kept.move_to_end(id)
        found = json.loads(text)
        return found["items"], found["body"]

    def drop(self, id: str) -> None:
        """Raises ApiError 404."""
        self.get(id)
        self.bytes -= len(self._kept.pop(id))


class Responses:
    """The endpoints, on top of a service's."""

    def __init__(self, service: Service, stored: Stored) -> None:
        self._service, self._stored = service, stored
        self.posts: list[tuple[str, Callable[[Request], Awaitable[Response]], type[BaseModel]]] = [
            ("/v1/responses", self.create, ResponsesAsk)
        ]

    async def create(self, request: Request) -> Response:
        """The next response."""
        ask = await self._service.read(ResponsesAsk, request)
        earlier: list[Item] = []
        if ask.previous_response_id is not None:
            earlier, _ = self._stored.get(ask.previous_response_id, "previous_response_id")
        order = await self._service.order_chat(ask.chat(earlier))
        items = [*earlier, *ask.items()]

        def keep(body: Mapping[str, Any]) -> bool:
            return self._stored.put(body["id"], [*items, *body["output"]], body)

        writer = ResponseWriter(ask, ask.model or self._service.name, keep)
        return await self._service.respond(request, order, writer, "text" if ask.text else None)

    async def retrieve(self, id: str) -> Response:
        """One that is kept."""
        return json_response(self._stored.get(id)[1])

    async def delete(self, id: str) -> Response:
        """Keep it no longer."""
        self._stored.drop(id)
        return json_response({"id": id, "object": "response", "deleted": True})
