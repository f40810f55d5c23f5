"""POST /v1/embeddings: hidden rows of a generative model, which nobody has trained to be compared."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch
from fastapi import Request as HTTPRequest
from fastapi.responses import Response
from pydantic import BaseModel, Field, field_validator
from torch import Tensor

from phasewise.llm import vector_of
from phasewise.request.params import Params
from phasewise.serve.about import StrictBody
from phasewise.serve.completions.schema import AS_MANY_AS_FIT, texts_or_ids
from phasewise.serve.failures import ApiError, json_response
from phasewise.serve.loop import OutputStream
from phasewise.serve.notifier import Notifier
from phasewise.serve.scores.scoring import ScoringRun

if TYPE_CHECKING:
    from phasewise.serve.service import Service


class EmbeddingAsk(StrictBody):
    """POST /v1/embeddings. `input` becomes a list of texts, or of lists of token ids."""

    input: Any = Field(description="a string, a list of strings, a list of token ids, or a list of such lists")
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1, le=AS_MANY_AS_FIT)] | None = None
    user: str | None = None
    # beyond OpenAI's
    pooling: Literal["mean", "last"] | None = None
    normalize: bool | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=1, le=AS_MANY_AS_FIT)] | None = None

    @field_validator("input", mode="plain")
    @classmethod
    def _input(cls, value: Any) -> list[str] | list[list[int]]:
        return texts_or_ids(value)


class Embeddings:
    """The endpoint."""

    def __init__(self, service: Service) -> None:
        self._service, self._llm = service, service.llm
        self.posts: list[tuple[str, Callable[[HTTPRequest], Awaitable[Response]], type[BaseModel]]] = [
            ("/v1/embeddings", self.embeddings, EmbeddingAsk)
        ]

    async def embeddings(self, request: HTTPRequest) -> Response:
        """A vector per input: the mean of its rows after the last layer, or the last of them."""
        ask = await self._service.read(EmbeddingAsk, request)
        recipe, width = self._service.recipe(ask.model), self._llm.model.config.hidden
        if ask.dimensions not in (None, width):
            reason = f"this model's vectors have {width} numbers, and a part of one means nothing: leave dimensions out"
            raise ApiError(400, reason, "dimensions", "invalid_value")
        params = Params(max_tokens=0, pooling=ask.pooling or "mean", truncate_prompt_tokens=ask.truncate_prompt_tokens)
        prompts = await asyncio.to_thread(lambda: [self._llm.encode(one) for one in ask.input])
        requests = [self._llm.request(ids, params, slo=self._service.slo, recipe=recipe) for ids in prompts]
        feeds = [OutputStream(one, Notifier()) for one in requests]
        total, most = sum(one.known for one in requests), self._llm.limits.max_running
        waves = [feeds[at : at + most] for at in range(0, len(feeds), most)]
        await ScoringRun(self._service, request.receive).run(waves)
        data = [
            {"object": "embedding", "index": i, "embedding": _written(vector_of(one, ask.normalize is not False), ask)}
            for i, one in enumerate(requests)
        ]
        usage = {"prompt_tokens": total, "total_tokens": total}
        return json_response({"object": "list", "model": ask.model or self._service.name, "data": data, "usage": usage})


def _written(vector: Tensor, ask: EmbeddingAsk) -> list[float] | str:
    """Encodes a vector as numbers, or as little-endian float32 in base64."""
    if ask.encoding_format != "base64":
        return vector.tolist()
    return base64.b64encode(bytes(vector.contiguous().view(torch.uint8).tolist())).decode()
