"""What a registry's server answers by itself: its models, its health, its metrics, and errors."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from fastapi import Request
from fastapi.responses import Response
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel

from phasewise.serve.about import DetokenizeAsk, TokenizeAsk
from phasewise.serve.completions.schema import ChatAsk, CompletionAsk
from phasewise.serve.failures import api_error, error_response, json_response
from phasewise.serve.guard.context import CURRENT, note
from phasewise.serve.messages.ask import CountAsk, MessagesAsk, error_body
from phasewise.serve.registry.dispatch import Dispatcher
from phasewise.serve.registry.metrics import RegistryMetrics
from phasewise.serve.registry.registry import ModelRegistry
from phasewise.serve.registry.slot import ModelSlot
from phasewise.serve.responses.ask import ResponsesAsk
from phasewise.serve.scores.embeddings import EmbeddingAsk
from phasewise.serve.scores.scoring import RerankAsk, ScoreAsk
from phasewise.version import __version__

# paths that a model's own application answers, as `Service.posts` has them
POSTS: tuple[tuple[str, type[BaseModel]], ...] = (
    ("/v1/completions", CompletionAsk),
    ("/v1/chat/completions", ChatAsk),
    ("/v1/messages", MessagesAsk),
    ("/v1/messages/count_tokens", CountAsk),
    ("/v1/responses", ResponsesAsk),
    ("/tokenize", TokenizeAsk),
    ("/detokenize", DetokenizeAsk),
    ("/v1/score", ScoreAsk),
    ("/v1/rerank", RerankAsk),
    ("/v1/embeddings", EmbeddingAsk),
)


class NeverSleeps:
    """A registry unloads models by itself."""

    def enter(self) -> None: ...

    def leave(self) -> None: ...

    async def awake(self) -> None: ...


class RegistryFront:
    """The server of many models. It is what `Service` is to the server of one."""

    def __init__(self, registry: ModelRegistry, wait: float) -> None:
        self.registry, self.created = registry, int(time.time())
        self.dispatcher, self.metrics = Dispatcher(registry, wait), RegistryMetrics(registry)
        self.sleeper = NeverSleeps()

    # ---- endpoints
    async def health(self) -> Response:
        """200 while requests are taken, whatever is loaded; 503 while the server shuts down."""
        if self.registry.stopping:
            return json_response({"status": "stopping"}, 503)
        states = {name: slot.state for name, slot in self.registry.slots.items()}
        return json_response({"status": "ok", "models": states})

    async def version(self) -> Response:
        """The version of phasewise."""
        return json_response({"version": __version__})

    async def show_metrics(self) -> Response:
        """Prometheus' exposition format."""
        return Response(await self.metrics.render(), media_type=CONTENT_TYPE_LATEST)

    async def models(self) -> Response:
        """Every name that the key may use, with the state of its model."""
        exchange = CURRENT.get()
        names = [name for name in self.registry.names if exchange is None or exchange.may(name)]
        return json_response({"object": "list", "data": [self._card(name) for name in names]})

    async def model(self, name: str) -> Response:
        """One of them."""
        self.registry.slot(name)
        if (exchange := CURRENT.get()) is not None:
            exchange.permit(name)
        return json_response(self._card(name))

    async def retrieve(self, id: str) -> Response:
        """A response that is kept."""
        return json_response(self.registry.stored.get(id)[1])

    async def delete(self, id: str) -> Response:
        """Keep it no longer."""
        self.registry.stored.drop(id)
        return json_response({"id": id, "object": "response", "deleted": True})

    async def refuse(self, request: Request, error: Exception) -> Response:
        """The response to any exception."""
        known = api_error(error)
        self.metrics.errors[known.status] += 1
        note(known)
        if request.url.path.startswith("/v1/messages"):
            return json_response(error_body(known), known.status)
        return error_response(known)

    # ---- the process
    def close(self) -> None:
        """Take nothing new: the server is shutting down."""
        self.registry.stopping = True
        self.dispatcher.close()
        for slot in self._loaded():
            assert slot.service is not None
            slot.service.close()

    def cancel_all(self) -> None:
        """Drop everything, at the end of a shutdown's patience."""
        for slot in self._loaded():
            assert slot.service is not None
            slot.service.cancel_all()

    def _loaded(self) -> Sequence[ModelSlot]:
        return [slot for slot in self.registry.slots.values() if slot.service is not None]

    def _card(self, name: str) -> dict[str, Any]:
        slot = self.registry.slot(name)
        card: dict[str, Any] = {"id": name, "object": "model", "created": self.created, "owned_by": "phasewise",
                                "state": slot.state, "bytes": slot.bytes, "pinned": slot.entry.pinned,
                                "parent": slot.entry.parent(name)}  # fmt: skip
        if slot.state == "loading":
            card["loaded"] = round(slot.fraction, 2)
        if slot.failure is not None:
            card["failure"] = slot.failure
        if slot.service is not None:
            card |= slot.service.card(name)
        return card
