"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter: adapters come and go while the server runs, as in vLLM."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from fastapi import Request
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict, Field

from phasewise.errors import UserError
from phasewise.serve.failures import ApiError, json_response
from phasewise.serve.guard.context import CURRENT

if TYPE_CHECKING:
    from phasewise.serve.service import Service

Text = Annotated[str, Field(min_length=1, max_length=4096)]


class LoadAsk(BaseModel):
    """POST /v1/load_lora_adapter: a name for requests, and a folder below that of --lora-dir."""

    model_config = ConfigDict(strict=True, extra="forbid")

    lora_name: Text
    lora_path: Text


class UnloadAsk(BaseModel):
    """POST /v1/unload_lora_adapter"""

    model_config = ConfigDict(strict=True, extra="forbid")

    lora_name: Text


class AdapterEndpoints:
    """Only where adapters may be loaded from a `folder`, and with keys only for those that may."""

    def __init__(self, service: Service, folder: Path | None) -> None:
        self._service, self._folder = service, folder
        self._turn = asyncio.Lock()
        self.posts: list[tuple[str, Callable[[Request], Awaitable[Response]], type[BaseModel]]] = []
        if folder is not None:
            self.posts += [
                ("/v1/load_lora_adapter", self.load, LoadAsk),
                ("/v1/unload_lora_adapter", self.unload, UnloadAsk),
            ]

    async def load(self, request: Request) -> Response:
        """Read an adapter, while others are served, and let requests name it."""
        _permit()
        ask, service = await self._service.read(LoadAsk, request), self._service
        llm, path = service.llm, self._path(ask.lora_path)
        async with self._turn:
            if ask.lora_name in service.names:
                raise ApiError(400, f"{ask.lora_name!r} is a model here already: unload it first, or take another name",
                               "lora_name", "already_loaded")  # fmt: skip
            try:
                lora = await asyncio.to_thread(llm.loras.read, ask.lora_name, str(path), llm.model.config)
                await service.engine.between(lambda: llm.take_lora(lora))
            except UserError as error:
                raise ApiError(400, str(error).replace(str(path), ask.lora_path), "lora_path") from error
            service.rename()
        return json_response({"status": "loaded", "lora_name": ask.lora_name, "rank": lora.rank})

    async def unload(self, request: Request) -> Response:
        """Have requests name it no more; those under way keep it."""
        _permit()
        ask, service = await self._service.read(UnloadAsk, request), self._service
        async with self._turn:
            try:
                await service.engine.between(lambda: service.llm.unload_lora(ask.lora_name))
            except UserError as error:
                raise ApiError(404, str(error), "lora_name", "model_not_found") from error
            service.rename()
        return json_response({"status": "unloaded", "lora_name": ask.lora_name})

    def _path(self, said: str) -> Path:
        """The folder that a request names. Raises ApiError for one that is not below that of --lora-dir."""
        assert self._folder is not None
        try:
            root = self._folder.resolve()
            path = (root / said).resolve()
            inside = path.is_relative_to(root) and path != root
        except (OSError, ValueError):  # a loop of links, a zero byte
            inside = False
        if not inside:
            raise ApiError(
                400, f"lora_path {said!r} is not below the folder of --lora-dir", "lora_path", "invalid_value"
            )
        return path


def _permit() -> None:
    """Raise ApiError where the key of the request may not do this."""
    exchange = CURRENT.get()
    if exchange is not None and exchange.quota is not None and not exchange.quota.key.loras:
        key = exchange.quota.key.name
        raise ApiError(403, f"the key {key!r} may not load and unload adapters", code="loras_not_allowed")
